"""What other frameworks call things, and what they are called here: the help for names that are not ours.

A name that people bring along is often near to one of ours by letters and far by meaning (`gather` and `greater`), so
it is looked up here before anything is guessed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

# Functions: what does the same, or the fact that nothing does.
_NOT_YET = "there is no such function yet"
FUNCTIONS: Mapping[str, str] = {
    name: help
    for names, help in (
        (
            "matmul mm bmm einsum linear tensordot dense",
            "a product is `dot(a, b, over = axis)`; other axes match by name",
        ),
        ("transpose permute swapaxes t", "axes go by name, so their order never matters"),
        (
            "reshape view flatten unflatten rearrange",
            "`split(x, axis -> [slow, fast])` and `merge(x, [slow, fast] -> axis)`",
        ),
        ("unsqueeze broadcast broadcast_to repeat_interleave tile", "`expand(x, axis)`"),
        ("gather take index_select lookup", "`embedding(ids, table, over = axis)` looks up rows of a table"),
        ("cat stack concatenate hstack vstack", "`concat(x, y, [first, second] -> both)`"),
        ("chunk narrow crop", "`slice(x, axis -> part, start = 0)`"),
        ("arange range positions", "`iota(axis)`"),
        ("pow power square", "`x * x`, or `exp(p * log(x))`"),
        ("clamp clip", "`minimum(maximum(x, low), high)`"),
        ("detach no_grad", "`stop_gradient(x)`"),
        ("nll_loss softmax_cross_entropy crossentropy", "`cross_entropy(logits, ids, over = axis)`"),
        ("mse_loss l2_loss", "`mse(x, y)`"),
        ("attention scaled_dot_product_attention sdpa flash_attention", "`attend(q, k, v, over = key, along = seq)`"),
        ("swish", "`silu(x)`"),
        ("mul prod", "`x * y`"),
        ("sub", "`x - y`"),
        ("div", "`x / y`"),
        ("neg", "`-x`"),
        ("eq ne lt le gt ge", "comparisons are `x == y`, `x < y`, `x >= y` and so on"),
        ("float to astype type_as int", "`cast(x, f32)`"),
        ("zeros ones full zeros_like ones_like", "a number stands beside tensors as it is: `x * 0`"),
        ("randn rand randn_like rand_like", "`sample noise: [batch, seq] ~ normal(1.0)` is a statement"),
        ("layernorm", "`layer_norm(x, over = axis)`"),
        ("rmsnorm", "`rms_norm(x, over = axis)`"),
        ("tril triu masked_fill", "`where(mask, x, y)`, with a mask made of `iota(axis)`"),
        ("var std", "`mean(x * x, over = axis)`, of what has mean 0"),
        ("norm", "`sqrt(sum(x * x, over = axis))`"),
        ("sin cos tan erf softplus log_sigmoid sign floor round logsumexp cumsum pad", _NOT_YET),
        ("argmax arg_max argmin topk sort roll scatter", _NOT_YET),
        ("conv conv1d conv2d max_pool avg_pool batch_norm group_norm", _NOT_YET),
        ("elu leaky_relu relu6 hardswish lstm gru rnn scan bce binary_cross_entropy kl_div huber", _NOT_YET),
    )
    for name in names.split()
}

# Arguments and entries: what stands for them here, in order of preference; the first that there is is meant.
SETTINGS: Mapping[str, tuple[str, ...]] = {
    name: tuple(ours.split())
    for names, ours in (
        ("axis axes dim dims dimension", "over along axis"),
        ("grad_clip gradient_clipping max_grad_norm clip_grad_norm clip_norm", "clip"),
        ("learning_rate", "lr"),
        ("wd", "weight_decay"),
        ("beta1 beta2", "betas"),
        ("epsilon", "eps"),
        ("max_steps num_steps iterations iters epochs", "steps"),
        ("micro_batches num_microbatches accumulate gradient_accumulation_steps", "microbatches"),
        ("virtual_stages num_chunks", "chunks"),
        ("dataset train_data", "data"),
        ("optim", "optimizer"),
        ("dtype amp mixed_precision", "precision"),
        ("checkpoints save save_every ckpt", "checkpoint"),
        ("evaluate evaluation validation val", "eval"),
        ("random_seed", "seed"),
        ("warmup_steps", "warmup"),
        ("total_steps decay_steps", "total"),
        ("max_lr", "peak"),
        ("min_lr", "floor"),
        ("val_split test_split validation_split", "holdout"),
        ("on_nan skip_nan nan_policy terminate_on_nan detect_anomaly", "on_bad_step"),
        ("file filename glob", "path"),
        ("path files pattern", "glob"),
    )
    for name in names.split()
}


def meant(name: str, there: Collection[str]) -> str | None:
    """The argument or entry, of those that there are, by which a name from elsewhere is called here."""
    return next((ours for ours in SETTINGS.get(name, ()) if ours in there), None)
