"""Functions that wrong files name. Never imported."""

raise AssertionError("a file that is checked runs nothing")


def norm(x, w):
    return x * w


def norm_backward(d, x, w):
    return d * w, (d * x).sum((0, 1))
