"""Hooks of mkdocs, for `make site`: the pages as they are in the repository, on a site.

What they link to outside of `docs/` comes along, fences may name their file, and headings have GitHub's anchors.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# What comes along: patterns in the repository.
BESIDE = ("specs/README.md", "specs/**/*.par", "grammars/*.lark", "bench/RESULTS.md", "bench/notes/*.md")
FENCE = re.compile(r"^(`{3,})(\w+)[ ]+(\S.*)$", re.M)
LINK = re.compile(r"\[([^\]]*)\]\(((?!\w+:)[^)#\s]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Anchors as GitHub makes them, which is where the pages are read as well."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = anchor
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what stands beside `docs/`."""
    root = Path(config.docs_dir).parent
    for pattern in BESIDE:
        for path in sorted(root.glob(pattern)):
            files.append(File.generated(config, path.relative_to(root).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put names of files above their fences, and point links to where things are on the site."""
    uri = page.file.src_uri
    # Where the page is in the repository, and the others are on the site.
    at = uri if page.file.generated_by else join("docs", uri)

    def link(match: re.Match[str]) -> str:
        text, target, fragment = match[1], match[2], match[3] or ""
        there = normpath(join(dirname(at), target)).removeprefix("docs/")
        for found in (there, join(there, "README.md")):
            if files.get_file_from_path(found) is not None:
                return f"[{text}]({relpath(found, dirname(uri) or '.')}{fragment})"
        # Of sources that are not on the site only the name is left.
        return text if not there.startswith(".") and (Path(config.docs_dir).parent / there).exists() else match[0]

    return LINK.sub(link, FENCE.sub(named, markdown))


def named(fence: re.Match[str]) -> str:
    """A fence below the name of its file, if it has one."""
    marks, language, words = fence[1], fence[2], fence[3]
    return f"`{words}`\n\n{marks}{language}" if "." in words else f"{marks}{language}"


def anchor(heading: str, separator: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)
