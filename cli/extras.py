"""Dependencies that not every installation has: the extras of the package (pyproject.toml)."""

from __future__ import annotations

from importlib.util import find_spec

# The modules of each extra. A command declares the extra that it needs: `parser.set_defaults(needs = "run")`.
EXTRAS = {
    "run": ("torch", "numpy", "safetensors"),
    "plot": ("matplotlib", "numpy"),
    "data": ("pyarrow", "tokenizers"),
    "hub": ("datasets", "tokenizers"),
    "images": ("PIL", "tokenizers"),
    "remote": ("fsspec", "s3fs", "gcsfs"),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "trackio": ("trackio",),
    "editor": ("pygls", "lsprotocol"),
    "completion": ("argcomplete",),
}


def missing(extra: str | None, what: str) -> str | None:
    """Why `what` cannot be done without an extra, and how to install it; None if nothing is missing."""
    absent = [name for name in EXTRAS[extra] if not _there(name)] if extra is not None else []
    return _message(what, ", ".join(absent), str(extra)) if absent else None


def explained(error: ImportError, what: str) -> str | None:
    """The same if importing a module of an extra failed because it is missing or broken; None for other modules."""
    name = (error.name or "").partition(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if name in modules), None)
    if extra is None:
        return None
    if isinstance(error, ModuleNotFoundError):
        return _message(what, name, extra)
    return f"{what} needs {name}, which cannot be imported: {error}"


def _message(what: str, names: str, extra: str) -> str:
    return f"{what} needs {names}: pip install 'partita[{extra}]'"


def _there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ImportError:
        return False
