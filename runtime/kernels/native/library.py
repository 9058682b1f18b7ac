"""The C++ files of this folder, compiled by the machine's compiler when they are first needed, and kept on disk.

That takes a second, once on a machine: they include no header of torch. What is kept is named after what it is made of
and for: the files, the options, the compiler and the processor. Where there is no compiler, or nothing can be kept,
there is no library: kernels take torch's operations, whose results are the same up to rounding. `PARTITA_NATIVE=0` says
that none is wanted.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from ctypes import CDLL, c_float, c_int, c_ssize_t, c_void_p
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partita.dsl.diagnostic import Refused
from partita.runtime.data.cache import file
from partita.runtime.kernels.compiling import is_tracing

VARIABLE = "PARTITA_NATIVE"
# Without -ffast-math: what is infinite or not a number stays so. With OpenMP, whose threads are torch's.
OPTIONS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-w")
SECONDS = 120  # for the compiler
# What the functions take: pointers, counts, numbers and flags.
_POINTER, _COUNT, _NUMBER, _FLAG = c_void_p, c_ssize_t, c_float, c_int
_TAKEN: dict[str, tuple[Any, ...]] = {
    "transpose": (*[_POINTER] * 2, _COUNT, _COUNT),
    "gelu": (*[_POINTER] * 2, _COUNT),
    "gelu_gradient": (*[_POINTER] * 3, _COUNT),
    "normalize": (*[_POINTER] * 3, _COUNT, _COUNT, _NUMBER, _FLAG),
    "normalize_gradient": (*[_POINTER] * 8, _COUNT, _COUNT, _FLAG),
    "nll": (*[_POINTER] * 4, _COUNT, _COUNT),
    "nll_gradient": (*[_POINTER] * 5, _COUNT, _COUNT, _COUNT, _NUMBER),
    "adamw": (_POINTER, _COUNT, *[_NUMBER] * 8),
    "sum_of_squares": (*[_POINTER] * 2, _COUNT),
    "attend": (*[_POINTER] * 6, _NUMBER),
    "attend_gradient": (*[_POINTER] * 10, _NUMBER),
}
_OTHERS_MAY_WRITE = 0o002


def library() -> Any:
    """The compiled functions as attributes; None if there are none on this machine."""
    return _found()[0]


def why_none() -> str:
    """Why there is no library on this machine, in a line; empty if there is one."""
    return _found()[1]


def why_none_on(device: torch.device) -> str:
    """Why ranks that compute on a device have no such kernels, where they could have: on a CPU."""
    return why_none() if device.type == "cpu" else ""


@cache
def _found() -> tuple[Any, str]:
    """The functions, or why there are none."""
    named = os.environ.get("CXX") or "c++"
    compiler = shutil.which(named)
    if os.environ.get(VARIABLE) == "0":
        return None, f"{VARIABLE}=0"
    if compiler is None:
        return None, f"there is no compiler `{named}`"
    try:
        path = _compiled(compiler)
        for each in (path, path.parent):
            if not _ours(each):
                return None, f"others may write to {each}"
        functions = CDLL(str(path))
    except subprocess.TimeoutExpired:
        return None, f"{compiler} takes longer than {SECONDS} s"
    except subprocess.SubprocessError:
        return None, f"{compiler} fails"
    except Refused as refused:
        return None, refused.diagnostics[0].message
    except OSError as error:
        return None, str(error)
    for name, argtypes in _TAKEN.items():
        getattr(functions, name).argtypes = argtypes
        getattr(functions, name).restype = None
    return functions, ""


def native(x: Tensor) -> Any:
    """The compiled functions if they apply to a tensor: f32, in the host's memory, and not a shape alone; None if they
    do not, or there are none. They take dense tensors: others are copied, so that bits do not depend on how one lies.
    """
    if x.dtype == torch.float32 and type(x) is Tensor and x.is_cpu and not is_tracing():
        return library()
    return None


def _compiled(compiler: str) -> Path:
    """The path of the library, which is made if it is not there. Raises OSError, SubprocessError and Refused."""
    folder = Path(__file__).parent
    sources = sorted(str(path) for path in folder.glob("*.cc"))
    made_by = Path(compiler).resolve().stat()
    parts: list[Any] = [OPTIONS, compiler, made_by.st_size, made_by.st_mtime_ns, _processor()]
    parts += [path.read_text() for path in sorted(folder.glob("*.[ch]*"))]

    def compile(path: str) -> None:
        subprocess.run([compiler, *OPTIONS, *sources, "-o", path], check=True, capture_output=True, timeout=SECONDS)

    return file(f"{sha256(repr(parts).encode()).hexdigest()[:32]}.so", compile, None)


def _processor() -> list[str]:
    """What says which instructions the processor has."""
    with suppress(OSError), Path("/proc/cpuinfo").open() as lines:
        return sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    return list(os.uname())


def _ours(path: Path) -> bool:
    """Whether nobody but this user and the system's can have written there."""
    status = path.stat()
    return status.st_uid in (0, os.getuid()) and not status.st_mode & _OTHERS_MAY_WRITE
