"""The packages of `partita`: folders at the top of the repository, of which `api` is its face."""

from setuptools import find_namespace_packages, setup

TOP = ("grammars", "dsl", "compiler", "runtime", "importing", "cli", "testing", "specs")
FOUND = [each for top in TOP for each in find_namespace_packages(include=[top, f"{top}.*"])]
FOLDERS = {f"partita.{name}": name.replace(".", "/") for name in FOUND if "uplot" not in name}

setup(packages=["partita", *FOLDERS], package_dir={"partita": "api", **FOLDERS})
