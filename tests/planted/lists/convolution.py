"""Sliding windows: their sizes, convolution, its gradients, and how it is split."""

from tests.planted.planted import Planted

FILE = "tests/reference/test_files.py::test_a_file_computes_what_it_means[images]"
SPREAD = "verify tests/planted/files/images.par layout=spread_"
STORED = "verify tests/planted/files/images.par layout=stored_"
OP, KERNEL = "compiler/ops/convolution.py", "runtime/kernels/convolution.py"
WINDOWS = "compiler/ops/windows.py"

MISTAKES = [
    Planted(
        "padding-of-the-other-end",
        KERNEL,
        "part = part.narrow(dim, before, size)",
        "part = part.narrow(dim, _, size)",
        FILE,
    ),
    Planted(
        "padding-left-out-of-the-gradient-of-a-kernel",
        KERNEL,
        "_TO_KERNEL[len(stride)](x, shape, d, stride, alike, dilation, groups)",
        "_TO_KERNEL[len(stride)](x, shape, d, stride, (0,) * len(alike), dilation, groups)",
        FILE,
    ),
    Planted(
        "zeros-around-patches",
        KERNEL,
        "torch.nn.functional.pad(x, last_first, value=number)",
        "torch.nn.functional.pad(x, last_first)",
        FILE,
    ),
    Planted(
        "first-axis-padded-like-the-last",
        KERNEL,
        "for dim in reversed(range(x.dim())) for end",
        "for dim in range(x.dim()) for end",
        "tests/compiler/ops/test_ops.py::test_results_do_not_depend_on_the_order_of_axes[patches]",
    ),
    Planted(
        "folded-without-dilation",
        KERNEL,
        "        if spread > 1:\n",
        "        if spread > 2:\n",
        "tests/compiler/ops/test_ops.py::test_gradient_is_the_derivative[fold-two]",
    ),
    Planted(
        "channels-before-groups",
        OP,
        "return _as(argument, [self.batch, (*self.groups, *self.over)], slid)",
        "return _as(argument, [self.batch, (*self.over, *self.groups)], slid)",
        FILE,
    ),
    Planted(
        "windows-apart-that-begin-outside",
        WINDOWS,
        "if ends == (0, 0) and axis.size == stride * into.size",
        "if axis.size == stride * into.size",
        "tests/compiler/ops/test_convolution.py::test_only_windows_that_lie_apart_are_split",
    ),
    Planted(
        "channels-not-summed",
        OP,
        "*(ShardingRule((name, name), (SUM,)) for name in self.over),",
        "*(ShardingRule((name, name), (None,)) for name in self.over),",
        SPREAD,
    ),
    Planted(
        "filters-not-summed",
        OP,
        "*(ShardingRule((name, name), (SUM,)) for name in names_of(roles.filters)),",
        "*(ShardingRule((name, name), (None,)) for name in names_of(roles.filters)),",
        SPREAD,
    ),
    Planted(
        "batch-not-summed",
        OP,
        "*(ShardingRule((name, name), (SUM,)) for name in names_of(roles.batch)),",
        "*(ShardingRule((name, name), (None,)) for name in names_of(roles.batch)),",
        STORED,
    ),
    Planted(
        "one-window-more",
        "dsl/convolution.py",
        "return (self.axis.size + sum(self.padding) - self.extent) // self.stride + 1",
        "return (self.axis.size + sum(self.padding) - self.extent) // self.stride + 2",
        "tests/dsl/test_wrong.py::test_wrong_file[conv_positions]",
    ),
    Planted(
        "window-of-the-filters",
        "dsl/convolution.py",
        "return own[: len(left)]",
        "return own[-len(left) :]",
        "tests/dsl/test_bodies.py::test_types_and_options",
    ),
]
