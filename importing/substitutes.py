"""What exports badly, by what computes the same: functions of libraries are replaced before a module is exported.

The proof compares the module as it is with what its substitutes compute.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from traceback import StackSummary
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import uninteresting_files
from torch.fx.proxy import TracerBase
from torch.nn import functional as F
from torch.nn.modules import transformer

from partita.importing.dropping import Dropping, without_samples


def exported(module: nn.Module, inputs: Mapping[str, Tensor]) -> torch.export.ExportedProgram:
    """A module's `forward` with these keyword arguments, exported. Raises what `torch.export` raises."""
    with _substituted(module), Dropping():
        program = torch.export.export(module, (), kwargs=dict(inputs), strict=False)
    without_samples(program.graph)
    return program


@contextmanager
def _substituted(module: nn.Module) -> Iterator[None]:
    """Experts of transformers do not sort, torch's encoders do not compare their masks with causal ones, which is a
    hint where the mask is applied, distributions do not check their arguments, which is a branch on data, and
    `x.data` is `x.detach()`, which a graph knows.
    """
    files = {type(part).__module__: None for part in module.modules()}
    with ExitStack() as stack:
        for part in module.modules():
            config = getattr(part, "config", None)
            if hasattr(part, "set_experts_implementation") and getattr(config, "_experts_implementation", None):
                cast("Any", part).set_experts_implementation("batched_mm")
        hint = _replaced(transformer, "_detect_is_causal_mask", lambda mask, is_causal=None, size=None: bool(is_causal))
        stack.enter_context(hint)
        stack.enter_context(_replaced(torch.distributions.Distribution, "_validate_args", False))
        for file in files:
            for name, function in SCANS.items():
                if file.startswith("transformers.") and hasattr(sys.modules[file], name):
                    stack.enter_context(_replaced(sys.modules[file], name, function))
        for name, cell in (("lstm_cell", _lstm_cell), ("gru_cell", _gru_cell)):
            stack.enter_context(_replaced(torch._VF, name, cell))
        stack.enter_context(_replaced(F, "embedding_bag", _embedding_bag))
        stack.enter_context(_replaced(F, "ctc_loss", _ctc_loss))
        stack.enter_context(
            _replaced(Tensor, "data", property(Tensor.detach, vars(torch._C.TensorBase)["data"].__set__))
        )
        for owner in (torch, Tensor):
            stack.enter_context(_replaced(owner, "bincount", _bincount))
        # By default a graph remembers the lines of methods called `forward` alone.
        stack.enter_context(_replaced(TracerBase, "_filter_traceback_frames", _lines_of_the_module))
        stack.enter_context(_with_buffers_once(module))
        stack.enter_context(_with_buffers_in_place(module))
        yield


def _lines_of_the_module(tracer: TracerBase, stack: StackSummary) -> StackSummary:
    """The frames of a stack from the module's `forward` on, without torch's own around functions."""
    first = next((i for i, frame in enumerate(stack) if frame.name == "forward"), len(stack))
    unlike = uninteresting_files()
    return StackSummary.from_list([frame for frame in stack[first:] if frame.filename not in unlike])


COUNTED = torch.bincount
MISSING = object()
LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@contextmanager
def _with_buffers_once(module: nn.Module) -> Iterator[None]:
    """Modules with buffers that stand at several places stand at one, preferably in a list: a graph cannot change a
    buffer of two names. At the others they are attributes.
    """
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for holder in module.modules():
        for name, part in holder.named_children():
            places.setdefault(part, []).append((holder, name))
    before: dict[nn.Module, dict[str, nn.Module | None]] = {}
    for part, own in places.items():
        if len(own) < 2 or next(part.buffers(), None) is None:
            continue
        own.sort(key=lambda place: not isinstance(place[0], LISTS))
        for holder, name in own[1:]:
            before.setdefault(holder, dict(holder._modules))
            if not isinstance(holder, LISTS):
                del holder._modules[name]
                holder.__dict__[name] = part
    try:
        yield
    finally:
        for holder, modules in before.items():
            holder._modules.clear()
            holder._modules.update(modules)
            for name in modules:
                holder.__dict__.pop(name, None)


@contextmanager
def _with_buffers_in_place(module: nn.Module) -> Iterator[None]:
    """A tensor that `forward` assigns to a buffer is written into it at the end: a graph forgets what is assigned."""
    forward = module.forward

    @wraps(forward)
    def written(*args: Any, **kwargs: Any) -> Any:
        before = {part: dict(part._buffers) for part in module.modules()}
        result = forward(*args, **kwargs)
        for part, buffers in before.items():
            for name, buffer in buffers.items():
                new = part._buffers.get(name)
                if isinstance(buffer, Tensor) and isinstance(new, Tensor) and new is not buffer:
                    part._buffers[name] = buffer.copy_(new)
        return result

    with _replaced(module, "forward", written):
        yield


@contextmanager
def _replaced(owner: object, name: str, by: object) -> Iterator[None]:
    before = vars(owner).get(name, MISSING)
    setattr(owner, name, by)
    try:
        yield
    finally:
        if before is MISSING:  # as a method, which the class has
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """`torch.bincount` of numbers that are all below `minlength`: as many as a graph can know of."""
    if not minlength:
        return COUNTED(input, weights)
    found = F.one_hot(input, minlength)
    counts: Tensor = found.sum(0) if weights is None else (found * weights[:, None]).sum(0)
    return counts


def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Bags of one length, as rows of ids."""
    if input.dim() != 2 or max_norm is not None or scale_grad_by_freq or (mode == "max" and padding_idx is not None):
        raise ValueError("embedding_bag: only rows of ids are understood, without `max_norm`")
    rows = F.embedding(input, weight)
    if mode == "max":
        return rows.amax(1)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[..., None]
    if padding_idx is None:
        return rows.sum(1) if mode == "sum" else rows.mean(1)
    counted = (input != padding_idx).to(rows.dtype)
    total = (rows * counted[..., None]).sum(1)
    return total if mode == "sum" else total / counted.sum(1, keepdim=True).clamp(min=1)


# ------------------------------------------------------------ connectionist temporal classification


@torch.library.custom_op("partita::ctc_loss", mutates_args=())
def ctc_nll(log_p: Tensor, targets: Tensor, frames: Tensor, lengths: Tensor, blank: int, zero: bool) -> Tensor:
    """The negative logarithm of each row's probability: torch's loss, whose graph has the sizes of what lengths say.

    log_p: [time, batch, classes]; targets: [batch, labels]; frames, lengths: [batch].
    """
    return _of_torch(log_p, targets, frames, lengths, blank, "none", zero)


_of_torch: Callable[..., Tensor] = F.ctc_loss  # before it is replaced


@ctc_nll.register_fake
def _(log_p: Tensor, targets: Tensor, frames: Tensor, lengths: Tensor, blank: int, zero: bool) -> Tensor:
    return log_p.new_empty(log_p.shape[1])


def _keep_rows(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor, int, bool], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _backward_of_rows(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    log_p, *others = ctx.saved_tensors
    blank, zero = ctx.options
    with torch.enable_grad():
        own = log_p.detach().requires_grad_()
        (found,) = torch.autograd.grad(_of_torch(own, *others, blank, "none", zero), own, gradient)
    return found, None, None, None, None, None


ctc_nll.register_autograd(_backward_of_rows, setup_context=_keep_rows)


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Rows of targets, each of which has a length."""
    if log_probs.dim() != 3 or targets.dim() != 2:
        raise ValueError("ctc_loss: only batches are understood, with a row of targets for each")
    frames, lengths = (torch.as_tensor(each).long() for each in (input_lengths, target_lengths))
    rows: Tensor = ctc_nll(log_probs, targets.long(), frames, lengths, blank, zero_infinity)
    if reduction == "mean":
        return (rows / lengths.clamp(min=1)).mean()
    return rows.sum() if reduction == "sum" else rows


# ------------------------------------------------------------ recurrences


@torch.library.custom_op("partita::linear_scan", mutates_args=())
def linear_scan(a: Tensor, x: Tensor, dim: int) -> Tensor:
    """h[t] = a[t] · h[t-1] + x[t] along a dimension, elementwise, with h = 0 before the first; `a` has the dimensions
    of x, of which some may be of size 1.
    """
    h = torch.zeros_like(x.select(dim, 0))
    states = []
    for each, own in zip(a.unbind(dim), x.unbind(dim), strict=True):
        h = each * h + own
        states.append(h)
    return torch.stack(states, dim)


@linear_scan.register_fake
def _(a: Tensor, x: Tensor, dim: int) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    a, _, ctx.dim = inputs
    ctx.save_for_backward(a, output)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    """The gradient of a state goes backward through later ones, by the factors that these were made with."""
    a, h = ctx.saved_tensors
    dim = ctx.dim
    first = torch.zeros_like(a.narrow(dim, 0, 1))
    later = torch.cat([a.narrow(dim, 1, a.shape[dim] - 1), first], dim).flip(dim)
    own = linear_scan(later, gradient.flip(dim), dim).flip(dim)
    before = torch.cat([torch.zeros_like(h.narrow(dim, 0, 1)), h.narrow(dim, 0, h.shape[dim] - 1)], dim)
    return (own * before).sum_to_size(a.shape), own, None


linear_scan.register_autograd(_backward, setup_context=_keep)


def _steps(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """How long steps of time are."""
    dt = dt if bias is None else dt + bias
    return F.softplus(dt) if softplus else dt


def _chunk_scan(
    x: Tensor,
    dt: Tensor,
    rate: Tensor,
    enter: Tensor,
    leave: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **unused: object,
) -> Tensor:
    """The state-space layer of Mamba-2, of which transformers computes chunks (arXiv 2405.21060).

    x: [batch, seq, heads, head]; dt: [batch, seq, heads]; rate: [heads]; enter, leave: [batch, seq, groups, states].
    """
    dt = _steps(dt, dt_bias, dt_softplus)
    dt = dt if tuple(dt_limit) == (0.0, float("inf")) else dt.clamp(*dt_limit)
    repeats = x.shape[2] // enter.shape[2]
    enter, leave = (each.repeat_interleave(repeats, dim=2) for each in (enter, leave))
    a = torch.exp(rate * dt)
    memory = linear_scan(a[..., None, None], (x * dt[..., None])[..., None] * enter[..., None, :], 1)
    y = torch.einsum("bshpn,bshn->bshp", memory, leave)
    return y if D is None else y + D[..., None] * x


def _selective_scan(
    x: Tensor,
    dt: Tensor,
    rate: Tensor,
    enter: Tensor,
    leave: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **unused: object,
) -> Tensor:
    """The state-space layer of Mamba, of which transformers computes one position after the other (arXiv 2312.00752).

    x, dt, z: [batch, inner, seq]; rate: [inner, states]; enter, leave: [batch, states, seq].
    """
    dt = _steps(dt, None if delta_bias is None else delta_bias[..., None], delta_softplus)
    a = torch.exp(rate[:, None] * dt[..., None])
    memory = linear_scan(a, (dt * x)[..., None] * enter.transpose(1, 2)[:, None], 2)
    y = torch.einsum("bisn,bns->bis", memory, leave)
    y = y if D is None else y + D[:, None] * x
    return y if z is None else y * F.silu(z)


def _lstm_cell(
    x: Tensor, state: Sequence[Tensor], w: Tensor, u: Tensor, b: Tensor | None = None, c: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`torch.nn.LSTMCell`, with a name for each gate. x: [batch, input]; state: two of [batch, hidden]."""
    h, memory = state
    xi, xf, xg, xo = F.linear(x, w, b).chunk(4, -1)
    hi, hf, hg, ho = F.linear(h, u, c).chunk(4, -1)
    i = torch.sigmoid(xi + hi)
    f = torch.sigmoid(xf + hf)
    g = torch.tanh(xg + hg)
    o = torch.sigmoid(xo + ho)
    memory = f * memory + i * g
    return o * torch.tanh(memory), memory


def _gru_cell(x: Tensor, h: Tensor, w: Tensor, u: Tensor, b: Tensor | None = None, c: Tensor | None = None) -> Tensor:
    """`torch.nn.GRUCell`, with a name for each gate. x: [batch, input]; h: [batch, hidden]."""
    xr, xz, xn = F.linear(x, w, b).chunk(3, -1)
    hr, hz, hn = F.linear(h, u, c).chunk(3, -1)
    r = torch.sigmoid(xr + hr)
    z = torch.sigmoid(xz + hz)
    n = torch.tanh(xn + r * hn)
    return (1 - z) * n + z * h


# Functions of transformers, by name.
SCANS: Mapping[str, Callable[..., Tensor]] = {
    "mamba2_chunk_scan": _chunk_scan,
    "mamba_selective_scan": _selective_scan,
}
