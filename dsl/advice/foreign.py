"""What to write instead of the names and notation of other frameworks and languages; shown as help.

A foreign name is often close in spelling to one of ours and far in meaning (`gather` and `greater`), so it is looked up
here before spelling is compared.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping


def _by_name(text: str) -> dict[str, str]:
    """What is said of each name: a line is for all the names before its colon, and goes on in the indented ones."""
    rows = (line.split(": ", 1) for line in re.sub(r"\n +", " ", text.strip()).split("\n"))
    return {name: hint for names, hint in rows for name in names.split()}


def _choices(text: str) -> dict[str, tuple[str, ...]]:
    """What each name may stand for: the words after the colon."""
    return {name: tuple(words.split()) for name, words in _by_name(text).items()}


# Functions: the equivalent.
FUNCTIONS: Mapping[str, str] = _by_name("""
matmul mm bmm einsum linear tensordot dense: a product is `dot(a, b, over = axis)`; other axes match by name
transpose permute swapaxes t: axes are matched by name, so their order never matters
reshape view flatten unflatten rearrange: `split(x, axis -> [slow, fast])` and `merge(x, [slow, fast] -> axis)`
unsqueeze broadcast broadcast_to repeat_interleave tile: `expand(x, axis)`
squeeze: `sum(x, over = axis)`, of an axis of size 1
take index_select take_along_dim take_along_axis: `gather(x, ids, along = axis)`
select first last unbind: `gather(x, 0, along = axis)`; the last position is `size(axis) - 1`
lookup: `embedding(ids, table, over = axis)` looks up rows of a table
onehot: `one_hot(ids, axis)`
argmax: `arg_max(x, over = axis)`
argmin: `arg_max(-x, over = axis)`
cumulative_sum cumsum_: `cumsum(x, over = axis)`
cumprod: `exp(cumsum(log(x), over = axis))`, of positive numbers
sort argsort: `top_k(x, axis -> ranks)`, with an axis `ranks` of the same size, gives both
reverse flipud fliplr: `flip(x, over = axis)`
pad: `concat(x, zeros([…]), [axis, more] -> longer)`; `conv` and `patches` have `padding`
scatter scatter_add index_add segment_sum scatter_sum bincount: `sum_by(x, ids, edges -> nodes)`
scatter_mean segment_mean: `mean_by(x, ids, edges -> nodes)`
scatter_max scatter_reduce segment_max: `max_by(x, ids, edges -> nodes)`
scatter_softmax segment_softmax edge_softmax: `softmax_by(x, ids, edges -> nodes)`
logical_xor xor: `a != b`, of booleans
cat concatenate hstack vstack: `concat(x, y, [first, second] -> both)`
stack: `concat(expand(x, one), expand(y, one), [one, one] -> two)`, with `axis one = 1, two = 2`
chunk narrow crop: `slice(x, axis -> part, start = 0)`
arange range positions: `iota(axis)`
pow square: `power(x, 2)`
clamp clip: `minimum(maximum(x, low), high)`
detach no_grad: `stop_gradient(x)`
nll_loss softmax_cross_entropy crossentropy crossentropyloss: `cross_entropy(logits, ids, over = axis)`
mse_loss l2_loss mseloss: `mse(x, y)`
l1_loss mae: `mean(abs(x - y))`
attention scaled_dot_product_attention sdpa flash_attention multiheadattention:
    `attend(q, k, v, over = seq, along = key)`: softmax over the positions of `k`, products along the keys
swish: `silu(x)`
leaky_relu: `maximum(x, 0.01 * x)`
logsigmoid: `log_sigmoid(x)`
mul: `x * y`
mod fmod: `remainder(x, n)` of integers, `x - n * floor(x / n)` of floats
div_floor floordiv: `floor_divide(x, n)` of integers, `floor(x / n)` of floats
sub: `x - y`
div: `x / y`
neg: `-x`
eq ne lt le gt ge: comparisons are `x == y`, `x < y`, `x >= y` and so on
float to astype type_as int: `cast(x, f32)`
ones full ones_like: numbers and tensors mix directly: `x * 0 + 1`
randn rand randn_like rand_like: `sample noise: [batch, seq] ~ normal(1.0)` is a statement
layernorm: `layer_norm(x, over = axis)`
rmsnorm: `rms_norm(x, over = axis)`
rotary apply_rotary_emb rotary_embedding: `rope(x, over = seq, pairs = key)`
tril triu masked_fill: `where(mask, x, y)`, with a mask made of `iota(axis)`
var std: the mean of the squares of `x - mean(x, over = axis)`
norm: `sqrt(sum(x * x, over = axis))`
normalize cosine_similarity: `x * rsqrt(sum(x * x, over = axis) + 1e-12)` has length 1
checkpoint remat: `recompute` is a rule of the layout
gated_delta_rule chunk_gated_delta_rule delta_net gated_delta_net: `delta_rule(q, k, v, beta, decay, over, along)`
associative_scan selective_scan mamba ssm: `linear_scan(a, b, over = axis)`: h[t] = a[t]·h[t−1] + b[t]
grads gradient vjp value_and_grad autograd backward:
    `grad(y, x)` by `x` of the sum of all elements of `y`, as a tensor with the axes of `x`
jacobian hessian jvp: `grad(y * v, x)` is the Jacobian transposed times v; of a `grad` again, the Hessian times v
fft rfft:
    `dot(x, cos(angle), over = seq)` and `-dot(x, sin(angle), over = seq)` are its parts, with `let angle = 6.2831853 /
    size(seq) * expand(cast(iota(seq), f32), waves) * cast(iota(waves), f32)`, `axis waves = seq`
inv linalg_inv: `inverse(x, over = [rows, columns])`
atan arctan: `atan2(x, 1)`
arctan2: `atan2(y, x)`
ifft irfft fft2 ifft2 stft dct pinv solve lstsq cholesky svd qr lu eig eigh det slogdet asin arcsin acos arccos:
    no function here does that: an `op` is an operation of your own, which torch computes
log1p: `log(1 + x)`
expm1: `exp(x) - 1`
log2: `log(x) / 0.69314718`
log10: `log(x) / 2.30258509`
exp2: `exp(0.69314718 * x)`
sinh: `(exp(x) - exp(-x)) / 2`
cosh: `(exp(x) + exp(-x)) / 2`
selu: `1.05070099 * where(x > 0, x, 1.67326324 * (exp(minimum(x, 0)) - 1))`
celu: `where(x > 0, x, exp(minimum(x, 0)) - 1)`
prelu: `maximum(x, 0) + w * minimum(x, 0)`, with a parameter `w`
mish: `x * tanh(softplus(x))`
softsign: `x / (1 + abs(x))`
hardsigmoid: `minimum(relu(x + 3), 6) / 6`
hardtanh: `minimum(maximum(x, -1), 1)`
glu: `x * sigmoid(y)`, of two products
swiglu: `silu(x) * y`, of two products
geglu: `gelu(x) * y`, of two products
reciprocal: `1 / x`
outer: `expand(x, column) * y`, of an `x` with the axis `row` and a `y` with `column`
lerp: `x + w * (y - x)`
prod: `exp(sum(log(x), over = axis))`, of positive numbers
any: `max(cast(x, f32), over = axis) > 0`
all: `min(cast(x, f32), over = axis) > 0`
isnan: `x != x`
median quantile: `top_k(x, axis -> ranks)`, with an axis `ranks` of the same size, sorts them for a `gather`
eye: `one_hot(iota(row), column)`
diag diagonal: `sum(x * one_hot(iota(row), column), over = column)`
trace: `sum(x * one_hot(iota(row), column), over = [row, column])`
clone copy contiguous identity: `x` itself: values do not change
vmap: functions apply along all axes that they do not name
tan: `sin(x) / cos(x)`
ceil: `-floor(-x)`
trunc: `sign(x) * floor(abs(x))`
topk: `top_k(x, axis -> chosen)` gives the greatest elements and their indices
bincount histc: `load(ids, over = axis, into = experts)` counts how often each id occurs
moe mixture_of_experts grouped_mm: `routed_dot(x, w, ids, over = axis, along = experts)`, after `top_k`
route router: `top_k(softmax(logits, over = experts), experts -> chosen)`
conv1d conv2d conv3d convolution depthwise_conv:
    `conv(image, kernel, [height, width] -> [rows, columns], over = channels)`
unfold im2col: `patches(image, [height, width] -> [rows, columns], size = [kh, kw])`
max_pool maxpool max_pool1d max_pool2d maxpool2d:
    `max(patches(x, [height, width] -> [rows, columns], size = [kh, kw], stride = 2), over = [kh, kw])`
avg_pool avgpool avg_pool1d avg_pool2d avgpool2d:
    `mean(patches(x, [height, width] -> [rows, columns], size = [kh, kw], stride = 2), over = [kh, kw])`
adaptive_avg_pool2d global_avg_pool: `mean(x, over = [height, width])`
interpolate upsample: `merge(expand(x, twice), [height, twice] -> tall)`: each element repeated
group_norm groupnorm: `layer_norm(split(x, channels -> [groups, part]), over = [part, height, width])`, merged again
batch_norm batchnorm batch_norm2d batchnorm2d:
    blocks to import: `batch_norm` and `batch_norm_image` of specs/zoo/blocks/batch_norm.par
bce bce_loss bce_with_logits: `binary_cross_entropy(logits, targets)`
relu6: `minimum(relu(x), 6)`
elu: `where(x > 0, x, exp(minimum(x, 0)) - 1)`
hardswish: `x * minimum(relu(x + 3), 6) / 6`
kl_div: `sum(p * (log_p - log_q), over = axis)`, of two results of `log_softmax`, and `exp` of the first
huber huber_loss smooth_l1 smooth_l1_loss: `where(abs(e) < 1, 0.5 * e * e, abs(e) - 0.5)`
lstm gru rnn: a block with `scan seq { … }`, which runs a cell at one position after the other
conv_transpose conv_transpose1d conv_transpose2d convtranspose2d deconv:
    each element repeated, by `expand` and `merge`, and a `conv`; or, without overlap, a `dot` and `merge`
bernoulli: `sample u: [batch, seq] ~ uniform(1.0)` is a statement, and `u < 2 * p - 1` is true with probability p
multinomial categorical gumbel_max:
    `sample g: [batch, vocab] ~ gumbel()` is a statement, and `arg_max(logits + g, over = vocab)` an id for each row
randint: `sample k: i64[batch] ~ integers(n)` is a statement: ids from 0 to n − 1
all_reduce allreduce all_gather reduce_scatter all_to_all psum send recv barrier:
    communication is implicit: the layout says how tensors are split, and the compiler inserts collectives
""")

# Parallelism degrees -> the usual name of the mesh axis.
PARALLEL: Mapping[str, str] = _by_name("""
dp data_parallel data_parallel_size: data
tp tensor_parallel tensor_parallel_size tensor_model_parallel_size: tensor
pp pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size: pipe
cp context_parallel context_parallel_size: context
""")

# Axes, arguments, entries, dtypes -> names here, in order of preference; the first one that exists is used.
SETTINGS: Mapping[str, tuple[str, ...]] = _choices("""
axis axes dim dims dimension: over along axis
p prob dropout drop dropout_p attention_dropout attn_dropout: rate dropout
sliding_window window_size: window
soft_cap logit_softcapping attn_logit_softcapping: softcap
segment_ids document_ids doc_ids: segments
sinks attention_sink: sink
rope_scaling: scaling
theta rope_theta: base
ignore_index ignore_id: ignore
grad_clip gradient_clipping max_grad_norm clip_grad_norm clip_grad clip_norm: clip
ema_decay ema_rate ema_momentum model_ema model_ema_decay use_ema polyak swa averaging: ema
learning_rate: lr peak
lr: peak
wd: weight_decay
beta1 beta2 adam_beta1 adam_beta2: betas
epsilon adam_eps: eps
max_steps num_steps iterations iters max_iters train_iters num_train_steps: steps total
steps every frequency period: interval
micro_batches num_microbatches accumulate grad_accum gradient_accumulation_steps: microbatches
virtual_stages num_chunks: chunks
dataset train_data: data
optim: optimizer
dtype amp mixed_precision: precision
checkpoints save save_every save_interval save_steps ckpt: checkpoint
evaluate evaluation validation val eval_interval eval_every eval_steps: eval
random_seed: seed
cuda_graph cuda_graphs enable_cuda_graph cudagraphs reduce_overhead: graphs
warmup_steps warmup_iters: warmup
total_steps decay_steps lr_decay_iters: total
max_lr: peak
min_lr: floor
val_split test_split validation_split: holdout
file filename: path glob
on_nan skip_nan nan_policy terminate_on_nan detect_anomaly: on_bad_step
path files pattern: glob
batch_size bs global_batch_size train_batch_size: batch
seq_len seq_length sequence_length block_size context_length max_seq_len max_seq_length n_ctx: seq
hidden_size hidden_dim d_model n_embd embed_dim embedding_dim model_dim: embed width hidden features
intermediate_size ffn_dim d_ff ffn_hidden_size mlp_dim: ffn hidden
vocab_size padded_vocab_size: vocab
n_head n_heads num_heads num_attention_heads: heads
num_kv_heads num_key_value_heads num_query_groups n_kv_heads: groups kv_heads
head_dim d_head kv_channels: key
fp32 float32 float: f32
fp64 float64 double: f64
bfloat16 fp16 float16 f16 half: bf16
int64 long: i64
int32 int: i32
boolean: bool
uint8: u8
uint16: u16
uint32: u32
he kaiming_normal kaiming_uniform: kaiming
glorot xavier_normal xavier_uniform: xavier
std stddev sigma: deviation
params parameters weights: param
grads gradients: grad
states optimizer optimizer_state moments: state
randn gaussian trunc_normal normal_: normal
step steplr step_lr multistep exponential: stepwise
noam inverse_square_root inv_sqrt rsqrt: inverse_sqrt
uniform_ rand: uniform
zero zeros_: zeros
one ones_: ones
""") | {name: (axis,) for name, axis in PARALLEL.items()}

# Settings that have no entry here, because they follow from something else.
FOLLOWS: Mapping[str, str] = _by_name("""
lr learning_rate: the learning rate is the optimizer's: `optimizer = adamw(lr = 1e-3)`
scheduler lr_scheduler: the learning rate schedule is the value of `lr`: `adamw(lr = cosine(…))`
batch_size bs global_batch_size train_batch_size: the batch is an axis: `axis batch = 32`
epochs num_epochs num_train_epochs: training length is given in steps: `train.steps`
micro_batch_size microbatch_size per_device_train_batch_size:
    the schedule's `microbatches` is the number of microbatches; each is an equal part of the batch
n_layer n_layers num_layers layers depth: the number of layers is that of a `repeat` in the model
world_size gpus num_gpus n_gpus ngpus devices nproc nproc_per_node ranks:
    the number of ranks is the product of the mesh's axes
mesh: ranks are those of a declared mesh: `mesh m(data = 2)`, `layout l on m { }`, `layout = l`
gradient_accumulation_steps gradient_accumulation accumulation_steps accumulate_grad_batches grad_accum
    grad_accumulation_steps accumulate microbatches num_microbatches:
    that is the number of microbatches: `schedule accumulate = gpipe(microbatches = 4)`
fp16 float16 bf16 bfloat16 half use_amp use_fp16 use_bf16: numbers are in bf16 with `precision = bf16`
log_every log_interval log_freq log_steps log_every_n_steps logging_steps print_every print_interval:
    every step is recorded, in `metrics.jsonl` of the run's directory
device cuda gpu gpu_id use_gpu use_cuda no_cuda accelerator mps nvidia:
    a run takes a GPU for each rank where there are any; `partita run --transport gloo` keeps to CPUs
resume resume_from resume_from_checkpoint auto_resume load restore:
    a run goes on by itself from the newest checkpoint in its directory: `partita run FILE --run-dir DIR`
output_dir out_dir output out save_dir log_dir logdir run_dir checkpoint_dir run_name name:
    a run writes to `runs/NAME`, or where `partita run FILE --run-dir DIR` says
wandb use_wandb wandb_project tensorboard mlflow trackio logger loggers report_to:
    metrics are handed on by `partita run FILE --track NAME`: tensorboard, wandb, mlflow or trackio
num_workers dataloader_num_workers workers prefetch prefetch_factor pin_memory:
    data is read while the step before computes; there is nothing to set
""")

# Options of commands and arguments of functions -> what stands for them here: the first that a command or function has.
OPTIONS: Mapping[str, tuple[str, ...]] = _choices("""
gpus num_gpus n_gpus ngpus nproc nproc_per_node world_size ranks num_devices: devices
checkpoint checkpoints ckpt ckpt_path checkpoint_path resume resume_from load: place directory
run run_dir rundir dir path output_dir out_dir save_dir log_dir logdir folder checkpoint_dir from:
    place run_dir directory
tokens max_tokens max_new_tokens num_tokens max_length n_tokens new_tokens: length
text input message: prompt
backend dist_backend: transport
wandb tensorboard mlflow trackio logger report_to: track
profile profiler: trace
time time_limit budget max_time timeout: within stall_timeout
dataset test_data eval_data: data
trust_remote_code: allow_python
callback callbacks hook hooks on_step_end log_fn: on_step
params state_dict: parameters
batch data: inputs
""")

# What paths of modules begin with; before the dot of a method stands a value.
MODULES = frozenset((
    "torch", "nn", "F", "functional", "optim", "math", "np", "numpy", "jax", "jnp", "lax", "hk", "flax", "linen", "eqx",
    "optax", "tf", "keras", "layers", "ops", "mx", "self",
))  # fmt: skip

# Tensor members and values of other languages.
MEMBERS: Mapping[str, str] = {
    "T": "axes are matched by name, so their order never matters",
    "mT": "axes are matched by name, so their order never matters",
    "shape": "the size of an axis is `size(axis)`",
    "size": "the size of an axis is `size(axis)`",
    "grad": "gradients are computed automatically",
    "weight": "a parameter is declared where it is used: `param w: [embed, ffn] ~ normal(0.02)`",
    "bias": "a parameter is declared where it is used: `param b: [embed] ~ zeros()`",
}
VALUES: Mapping[str, str] = {
    "True": "did you mean `true`?",
    "False": "did you mean `false`?",
    "None": "omit an argument that is not needed",
    "inf": "to mask something, `1e30` is large enough",
    "pi": "`3.14159265`",
    "same": "padding is a number: `padding = 1` keeps the size under a window of 3",
    "valid": "without padding, a window stays inside: leave `padding` out",
}

# Words with which statements and operators of other languages begin.
WORDS: Mapping[str, str] = _by_name("""
if else elif switch match case:
    `where(condition, a, b)` chooses elementwise, `where(training(), a, b)` between training and evaluation; what
    changes from run to run is a `const`, such as the count of a `repeat`
for while loop do: `repeat 4 as layer { … }` repeats statements, and `scan seq { … }` runs them along an axis
def class function func fn struct: a part of a model is a block: `block mlp(x: [batch, embed]) { … return y }`
lambda: a function is a `block`, with a name
var val auto mut: values are named with `let`: `let y = …`
print: a scalar is reported by `metric name = …`, and a tensor by `output name = …`
assert: claims about the compiled program stand in `expect { … }`
with: `stop_gradient(x)` cuts gradients off, and `train.precision` says the dtype
is in: values are compared by `==` and `!=`
from: `import "file.par"` reads a file; functions are built in
""")

# Characters that have no meaning here.
SIGNS: Mapping[str, str] = {
    "@": "a product is `dot(a, b, over = axis)`",
    ";": "remove it: statements need no separator",
    "'": 'strings are written in double quotes: `"…"`',
    "&": "booleans are joined by `and`; the lowest bits of integers are `remainder(x, 16)`",
    "|": "booleans are joined by `or`",
    "!": "booleans are inverted by `not`, and compared by `!=`",
    "%": "the remainder is `remainder(x, n)` of integers, `x - n * floor(x / n)` of floats",
    "?": "`where(condition, x, y)` selects elementwise",
    "^": "there is no power operator: `x * x`, or `power(x, p)`",
    **dict.fromkeys("“”„", 'strings are written in straight double quotes: `"…"`'),
    **dict.fromkeys("×·∙⋅", "a product is `a * b`"),
    **dict.fromkeys("–—−", "minus is the sign `-` of ASCII"),
    "÷": "a quotient is `a / b`",
    **dict.fromkeys("µμ", "microseconds are written `us`"),
    "²": "a square is `x * x`",
    "≤": "it is written `<=`",
    "≥": "it is written `>=`",
    "≠": "it is written `!=`",
    "→": "an arrow is written `->`",
}

INDEXING = (
    "tensors are not indexed: `gather(x, 0, along = axis)` takes one position, `slice(x, axis -> part, start = 0)` "
    "several, and `embedding(tokens, table, over = vocab)` rows of a table"
)
# (terminal, pattern, help): `‸` in the pattern marks the unexpected token; the terminal, unless empty, must be one of
# the expected ones.
_WRITTEN = tuple(
    (wanted, re.compile(pattern), help)
    for wanted, pattern, help in (
        ("LET", r"‸self\.(\w{1,40})", r"parameters are declared with `param`: `param \1: [embed, ffn] ~ normal(0.02)`"),
        ("LET", r"‸(\w{1,40})\s*([-+*/])=", r"values are named with `let`: `let \1 = \1 \2 …`"),
        ("LET", r"‸(\w{1,40}(?:\s*,\s*\w{1,40}){0,4})\s*=", r"values are named with `let`: `let \1 = …`"),
        ("LET", r"‸(\w{1,40})\s*:", r"a parameter is declared with `param`: `param \1: [embed] ~ normal(0.02)`"),
        ("", r"(?:^|\n)\s*import ‸\w|‸import\b", WORDS["from"]),
        ("", r"\*\s*‸\*", "there is no power operator: `x * x`, or `power(x, p)`"),
        (
            "",
            r"[\w)\]][ \t]*/‸/",
            "sizes divide exactly by `/`, and tensors by `floor(x / n)`; comments start with `#`",
        ),
        ("", r"/\s*‸/|‸//|\"\"‸\"|‸\"\"\"", "comments start with `#`"),
        (
            "",
            r"\b(?:freeze|update|recompute|offload|place|shard)\s(?:[][\w.]+\s*,\s*)*(?:\w+\.)*(\w{1,40})\.‸([0-9]{1,6})",
            r"iterations stand in brackets: `\1[\2]`, or `\1[0..\2]`",
        ),
        (
            "",
            r"\bstage\s(?:\w+\s*,\s*)*(\w{1,40})\s*‸\[",
            r"`stage \1 -> …` cuts between any iterations; to choose, `place \1[0..1] -> …[0]`",
        ),
        ("", r"‸\.[0-9]", "numbers start with a digit: `0.5`"),
        ("", r"\w\[[^\[\]\n]*[0-9]\.?‸\.", "one iteration at a time: `name[0]`"),
        ("", r"[0-9]‸\.", "a digit follows the point: `1.0`"),
        ("", r"\b[fFrRbBuU]‸\"", 'strings are plain, without a letter before them: `"…"`'),
        ("", r"\.(?:shape|size)\s*‸\[", MEMBERS["shape"]),
        ("", r"\bupdate\s[^\n]*‸by\b", "`by` comes after the call: `update … -> adamw(lr = 1e-3) by name`"),
        ("", r"\bfreeze\s[^\n]*‸by\b", "what is frozen has no gradient: leave out `by`"),
        ("", r"\)\s*by\s+\w+‸,", "a rule has the gradient of one loss, or without `by` of their sum"),
        ("PLUS", r"[\w)\]]\s*‸\[", INDEXING),
        ("", r"\w\[[^\[\]\n]*‸[,:.]", INDEXING),
        ("MINUS", r"‸~", SIGNS["!"]),
        ("ARROW", r"‸=>", SIGNS["→"]),
        ("COMPARE", r"\n\s*\w+(?:\(\w+\))?\s*‸=>", SIGNS["≥"]),
        ("COMPARE", r"\n\s*\w+(?:\(\w+\))?\s*‸=<", SIGNS["≤"]),
        ("COMPARE", r"\n\s*\w+(?:\(\w+\))?\s*‸=", "a claim compares, by `<=`, `>=`, `==`, `<` or `>`"),
        ("NAME", r"=\s*‸\{", "a list is written in brackets, and its pairs with an arrow: `[a -> b]`"),
        ("RBRACE", r"=\s*(\w{1,40})\s*‸->\s*(\w{1,40})", r"pairs stand in a list: `[\1 -> \2]`"),
        ("NAME", r"let\s*‸\(", "several names are separated by commas: `let a, b = …`"),
        ("EQUAL", r"let\s+(\w{1,40})\s*‸([-+*/])=", r"a name is bound anew: `let \1 = \1 \2 …`"),
        ("LET", r"‸(\w{1,40})[\w.]{0,40}\s*\(", "a statement begins with a keyword: `let y = …` names a result"),
        ("", r"<‸<|>‸>", "bits are shifted by `x * 4` and `floor_divide(x, 4)`"),
        ("", r"(?:[<>]=?|[=!]=)[^<>=!\n]*‸(?:[<>]=?|[=!]=)", "comparisons do not chain: `a < b and b < c`"),
        ("EQUAL", r"let\s+(\w{1,40})\s*‸:", r"the type of a value is inferred: `let \1 = …`"),
        ("AXIS", r"(?:^|\n)\s*‸(?:let\s+)?(\w{1,40})\s*=", r"sizes are declared with `axis`: `axis \1 = …`"),
        ("ON", r"layout\s+(\w{1,40})\s*‸", r"a layout is on a mesh: `layout \1 on … {`"),
        ("LBRACE", r"train\s*‸", "settings are written in braces: `train { steps = 100 … }`"),
        ("LBRACE", r"\)\s*‸(?::|->)", "a body is written in braces, and result types are inferred"),
        ("LPAR", r"(model|block)\s+(\w{1,40})\s*‸\{", r"inputs are declared: `\1 \2(x: [batch, embed]) {`"),
        ("AS", r"repeat\s+(\w{1,40})\s+‸([0-9]+)", r"the count comes first: `repeat \2 as \1 { … }`"),
        ("LSQB", r":\s*\w*\s*‸\(\s*(\w[\w, ]{0,60})\)", r"axes are written in brackets: `[\1]`"),
        (
            "LSQB",
            r":\s*([Tt]ensor|float|int|f32|i64|bf16)\s*‸",
            "the axes of a tensor follow in brackets: `[batch, embed]`",
        ),
        ("", r":\s*(?:nubmer|numer|num|numbr|int|float|scalar)\s*‸[,)]", "a number is declared as `name: number`"),
        ("", r":\s*number\s*‸=", "a number has no default: each call gives it"),
        ("LSQB", r":\s*(\w{1,40})\s*‸", r"axes are written in brackets: `[\1]`"),
        ("COLON", r"param\s+(\w{1,40})\s*‸[~=]", r"a parameter has a type: `param \1: [embed] ~ …`"),
        ("TILDE", r"‸(?!=|\w+\s*\()", "the initialization of a parameter follows `~`: `~ normal(0.02)`"),
        ("NAME", r"\bloss\s*‸=", "it takes no `=`: `loss mean(x)`"),
        ("NAME", r"->\s*‸[(\[]", "several are separated by commas: `-> data, tensor`"),
        ("NAME", r"mesh\s+(\w{1,40})\s*\(‸[0-9]", r"the axes of a mesh have names: `mesh \1(data = 2, pipe = 2)`"),
        ("", r"\bschedule(?:\s+\w+)?\s*=\s*(?:‸1[fF]|1[fF]‸1[bB])", "its name is `one_f_one_b`"),
        ("COLON", r"[(,]\s*(\w{1,40})\s*‸[,)]", r"an input has a type: `\1: [batch, embed]`, or `i64[batch]` for ids"),
        (
            "LPAR",
            r"schedule\s+\w+\s*=\s*(interleaved_1f1b|looped_bfs)\s*‸",
            r"a schedule is called: `\1(microbatches = 8, chunks = 2)`",
        ),
        ("LPAR", r"schedule\s+\w+\s*=\s*(\w{1,40})\s*‸", r"a schedule is called: `\1(microbatches = 8)`"),
        ("LPAR", r"\breturn\s+\w+\s*[-+*/]?‸=", "a value is returned as it is: `return x + y`"),
        ("SHARD", r",\s*\n\s*(?:stage|place|offload|overlap|recompute)\s+‸", "remove the comma before the rule"),
        ("SHARD", r"‸\w+\s*->", "a rule begins with a keyword: `shard batch -> data`, `stage layer -> pipe`"),
        ("SHARD", r"‸replicated?\b", "what no rule splits is replicated"),
        (
            "",
            r":\s*\w*\s*\[(?:[\w\s]+,)*\s*([\w ]*)‸([0-9*/+][\w */+]*)",
            r"axes are named: declare `axis name = \1\2`, and write that",
        ),
        ("RPAR", r"=\s*\([\w\s.-]+‸,", "a list is written in brackets: `[…, …]`"),
        ("AS", r"‸\{", "a `repeat` has a name: `repeat 4 as layer { … }`"),
        ("RBRACE", r"=[^,\n{}]+‸,", "remove it: entries are not separated by commas"),
    )
)
_AROUND = 80  # characters of context on either side


def meant(name: str, candidates: Collection[str]) -> str | None:
    """The name here for an axis, argument or entry of another framework, among those in `candidates`."""
    return next((ours for ours in SETTINGS.get(name.lower(), ()) if ours in candidates), None)


def function(name: str) -> str | None:
    """What to use here instead of a function of another framework."""
    return FUNCTIONS.get(name) or FUNCTIONS.get(name.lower())


def written_here(text: str, position: int, expected: Collection[str]) -> str | None:
    """Help for a foreign notation whose unexpected token is at `position`; `expected` are the expected terminals."""
    before, after = text[max(0, position - _AROUND) : position], text[position : position + _AROUND]
    marked = f"{before.replace('‸', '')}‸{after.replace('‸', '')}"
    for needed, pattern, help in _WRITTEN:
        if needed and needed not in expected:
            continue
        match = pattern.search(marked)
        if match is not None:
            return match.expand(help)
    return None
