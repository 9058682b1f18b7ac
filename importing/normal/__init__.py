"""ATen → the operations of this package: each function says what one operation is, and consumes its arguments.

The operations, and their arguments:

    view(x)  permute(x, order)  expand(x)  cast(x)        elements in other dimensions, or of another dtype
    slice(x, dim, start)  select(x, dim, index)           a part of a dimension
    concat(xs, dim)  flip(x, dim)  roll(x, dim, by)
    einsum(xs, letters, out)                              products; letters name dimensions
    pointwise(function, xs)                               of broadcast operands; `function` is the language's
    reduce(function, x, dims)                             dimensions stay, of size 1
    along(function, x, dim)                               softmax, cumsum, …: along one dimension
    norm(function, x, dims, scale, shift, eps)            layer_norm and rms_norm
    group_norm(x, groups, scale, shift, eps)  batch_norm(x, scale, shift, mean, variance, momentum, eps)
    embedding(ids, table, padding)  one_hot(ids)  top(x, count, dim, results)
    attend(q, k, v, mask, bias, causal, window, scale, dropout, softcap)  rope(x, position, base, …)
    conv(x, kernel, stride, padding, dilation, groups)  patches(x, size, stride, padding, fill)  resize(x)
    dropout(x, rate)
    cross_entropy(x, targets, ignore, smoothing)  mse(a, b)  binary_cross_entropy(x, targets)
"""
