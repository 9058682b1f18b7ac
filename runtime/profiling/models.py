"""The programs whose operations are measured: the files that come with Partita, in sizes that span what runs here."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import as_file, files

from attrs import frozen

from partita.compiler.pipeline import Compilation, compile_spec
from partita.dsl.load import load

_ONE_RANK = {
    "tiny": ("laptop.pipe=1", "fast.chunks=1", "fast.microbatches=1"),
    "gpt": ("cluster.data=1", "cluster.pipe=1", "cluster.tensor=1", "fast.chunks=1", "fast.microbatches=1"),
    "llama": ("layout=zero1", "cluster.data=1", "cluster.pipe=1", "cluster.tensor=1", "fast.microbatches=1"),
    "mlp": ("pair.data=1",),
}


@frozen
class Size:
    """A transformer's: rows of a microbatch, length and width, of a head, and of the vocabulary."""

    batch: int
    seq: int
    embed: int
    key: int
    vocab: int

    def overrides(self, model: str) -> tuple[str, ...]:
        """What makes a model as large."""
        if model == "mlp":
            return f"batch={self.batch * self.seq}", f"hidden={self.embed}"
        heads = self.embed // self.key
        axes = {"batch": self.batch, "seq": self.seq, "embed": self.embed, "key": self.key, "vocab": self.vocab}
        if model == "llama":
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


QUICK = 6  # takes one size of so many


def programs(gpu: bool, precisions: tuple[str, ...], quick: bool = False) -> Iterator[Compilation]:
    """The compiled programs; `quick`: of few sizes."""
    sizes = (ON_A_GPU if gpu else ON_A_CPU)[:: QUICK if quick else 1]
    for model, overrides in _ONE_RANK.items():
        with as_file(files("partita.specs") / f"{model}.par") as path:
            for size in sizes:
                for precision in precisions:
                    found, diagnostics = load(
                        path, [*overrides, *size.overrides(model), f"train.precision={precision}"]
                    )
                    assert found is not None, diagnostics
                    yield compile_spec(found)
