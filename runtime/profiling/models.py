"""The programs that are measured: the files that come with Partita, with fewer layers and in a range of sizes; and
attention to keys of other ranks, which is computed in pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import as_file, files

from attrs import evolve, frozen

from partita.compiler.passes.fewer_iterations import renumbered
from partita.compiler.passes.resized import Resized
from partita.compiler.pipeline import compile_spec
from partita.compiler.state import Compilation
from partita.dsl.load import load, load_text, spec_of
from partita.dsl.spec import Repeat, Spec, bodies

MICROBATCHES = 2
_CLUSTER = ("cluster.data=1", "cluster.pipe=1", "cluster.tensor=1")
_ONE_RANK = {
    "tiny": ("laptop.pipe=1", "fast.chunks=1"),
    "gpt": (*_CLUSTER, "fast.chunks=1"),
    "llama": (*_CLUSTER, "layout=zero1"),
    "mlp": ("pair.data=1",),
    "zoo/mixtral": (),
}
# The schedules of the files above. The last has none, so that gradients are not added to others.
_SCHEDULES = {"mlp": ("plain",), "zoo/mixtral": ()}
# Attention of two ranks, each with half of the positions.
CONTEXT = """
axis batch = 1, seq = 4, embed = 8, heads = 1, key = 8
model attention(x: [batch, seq, embed]) {
  repeat 3 as layer {
    param wq, wk, wv: [embed, heads, key] ~ normal(0.02)
    param wo: [heads, key, embed] ~ normal(0.02)
    let q = dot(x, wq, over = embed)
    let k = dot(x, wk, over = embed)
    let v = dot(x, wv, over = embed)
    let x = x + dot(attend(q, k, v, over = seq, along = key, causal = true), wo, over = [heads, key])
  }
  loss mean(x)
}
mesh ranks(context = 2)
layout gathered on ranks { shard seq -> context by zigzag, gather }
layout ring on ranks { shard seq -> context by zigzag, ring }
schedule fast = one_f_one_b(microbatches = 2)
train { layout = gathered  data = random()  optimizer = sgd(lr = 0.0)  steps = 1_000 }
"""
LAYOUTS = ("gathered", "ring")


@frozen
class Size:
    """The size of a transformer: rows of a microbatch, sequence length, width, width of a head, vocabulary."""

    batch: int
    seq: int
    embed: int
    key: int
    vocab: int

    def overrides(self, model: str) -> tuple[str, ...]:
        """The overrides that give a model this size."""
        if model == "mlp":
            return f"batch={self.batch * self.seq * MICROBATCHES}", f"hidden={self.embed}"
        heads = self.embed // self.key
        axes = {"batch": self.batch * MICROBATCHES, "seq": self.seq, "embed": self.embed, "key": self.key}
        if model != "context":
            axes["vocab"] = self.vocab
        if model in ("llama", "zoo/mixtral"):
            axes |= {"heads": 2, "groups": heads // 2, "ffn": 8 * self.embed // 3 // 16 * 16}
        else:
            axes |= {"heads": heads}
        return tuple(f"{name}={size}" for name, size in axes.items())


ON_A_CPU = (
    Size(1, 32, 32, 8, 64),
    Size(1, 64, 64, 16, 512),
    Size(4, 64, 64, 16, 128),
    Size(12, 64, 128, 32, 65),
    Size(2, 128, 128, 32, 256),
    Size(4, 128, 128, 32, 256),
    Size(16, 128, 128, 32, 256),
    Size(2, 128, 256, 64, 512),
    Size(4, 256, 256, 32, 512),
    Size(16, 128, 256, 32, 512),
    Size(2, 256, 512, 64, 2048),
    Size(1, 128, 1024, 64, 1024),
)
ON_A_GPU = (
    Size(1, 512, 256, 64, 512),
    Size(4, 1024, 768, 64, 50_304),
    Size(1, 2048, 1024, 64, 32_000),
    Size(4, 2048, 1024, 64, 32_000),
    Size(1, 2048, 2048, 128, 51_200),
    Size(4, 2048, 2048, 128, 51_200),
    Size(2, 2048, 4096, 128, 51_200),
    Size(1, 4096, 8192, 128, 51_200),
)


QUICK = 6  # one in this many sizes
# Iterations of a repeat. On a CPU, what one iteration leaves in the caches is gone by the next but one; a GPU has no
# such caches, and billions of parameters take long to initialize.
CPU_TURNS, GPU_TURNS = 3, 1


def programs(gpu: bool, precisions: tuple[str, ...], quick: bool = False) -> Iterator[Compilation]:
    """Yields the compiled programs; `quick`: of fewer sizes."""
    sizes = _sizes(gpu, quick)
    for model, overrides in _ONE_RANK.items():
        with as_file(files("partita.specs") / f"{model}.par") as path:
            for size in sizes:
                for precision in precisions:
                    config = [*overrides, *size.overrides(model), f"train.precision={precision}", "train.data=random()"]
                    config += [f"{name}.microbatches={MICROBATCHES}" for name in _SCHEDULES.get(model, ("fast",))]
                    yield compile_spec(_shallow(spec_of(load(path, config)), GPU_TURNS if gpu else CPU_TURNS))


def in_context(gpu: bool, precisions: tuple[str, ...], quick: bool = False) -> Iterator[Compilation]:
    """Yields compiled programs of two ranks that share the positions of a sequence; `quick`: of fewer sizes."""
    for size in _sizes(gpu, quick):
        for layout in LAYOUTS:
            for precision in precisions:
                config = [*size.overrides("context"), f"layout={layout}", f"train.precision={precision}"]
                spec = spec_of(load_text(CONTEXT, overrides=config))
                yield compile_spec(_shallow(spec, GPU_TURNS if gpu else CPU_TURNS))


def _sizes(gpu: bool, quick: bool) -> tuple[Size, ...]:
    return (ON_A_GPU if gpu else ON_A_CPU)[:: QUICK if quick else 1]


def _shallow(spec: Spec, deepest: int) -> Spec:
    """The file with at most `deepest` iterations of each repeat."""
    model, _ = spec.trained
    sizes = {name: axis.size for name, axis in spec.axes.items()}
    steps = [step for body in bodies(model.body) for step in body.steps if isinstance(step, Repeat)]
    kept = {id(step): range(min(step.count, deepest)) for step in steps}
    named = {name: range(deepest) for step in steps for name in (step.name, step.scope)}
    return evolve(renumbered(spec, named), model=Resized(sizes, kept).model(model))
