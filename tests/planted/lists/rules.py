"""Rules of optimizers: how each optimizer updates, what is frozen, how parameters are read, and means of weights."""

from tests.planted.planted import Planted

FILE = "tests/reference/test_files.py::test_a_file_computes_what_it_means"
SPLIT = "verify tests/planted/files/rules.par"
ASSIGN = "tests/compiler/passes/test_assign.py"
OPTIMIZERS = "tests/runtime/kernels/test_optimizers.py"
MEANS = "tests/runtime/checkpoint/test_ema.py"

MISTAKES = [
    Planted(
        "lion-steps-by-its-new-mean",
        "runtime/kernels/optimizers.py",
        "    direction = mean.lerp(gradient, 1 - beta1).sign_()\n",
        "    direction = mean.lerp(gradient, 1 - beta2).sign_()\n",
        f"{OPTIMIZERS}::test_lion_is_that_of_its_authors_formula",
    ),
    Planted(
        "lion-without-decay",
        "compiler/optimizers/lion.py",
        "return Lion(float(beta1), float(beta2), parameter.decay)",
        "return Lion(float(beta1), float(beta2), 0.0)",
        f"{FILE}[rules]",
    ),
    Planted(
        "factored-means-divided-by-the-other-count",
        "compiler/optimizers/adafactor.py",
        "            count = parameter.elements // max(1, parameter.without(summed).elements)\n",
        "            count = parameter.without(summed).elements\n",
        f"{FILE}[rules]",
    ),
    Planted(
        "adafactor-clips-no-step",
        "runtime/kernels/optimizers.py",
        ".div_(clip_threshold).clamp_(min=1.0)",
        ".div_(clip_threshold).clamp_(min=0.0)",
        f"{FILE}[rules]",
    ),
    Planted(
        "adafactor-relative-to-its-own-part",
        "compiler/optimizers/adafactor.py",
        "return (*means, inverse, _squared(build, direction), _squared(build, part))",
        "whole = _squared(build, direction); return (*means, inverse, whole, whole)",
        f"{FILE}[rules]",
    ),
    Planted(
        "tables-are-not-factored",
        "compiler/optimizers/adafactor.py",
        "(parameter.rows or type.names[:-1], ())",
        "(type.names, ())",
        f"{FILE}[rules]",
    ),
    Planted(
        "muon-of-split-matrices",
        "compiler/optimizers/muon.py",
        "return tuple(ShardingRule((name,), (name,)) for name in self.stacked)",
        "return tuple(ShardingRule((name,), (name,)) for name in operands[0].names)",
        SPLIT,
    ),
    Planted(
        "muon-of-a-whole-stack-as-one-matrix",
        "runtime/kernels/optimizers.py",
        "matrix = matrix / torch.linalg.vector_norm(matrix, dim=(1, 2), keepdim=True).clamp_(min=eps)",
        "matrix = matrix / torch.linalg.vector_norm(matrix).clamp_(min=eps)",
        f"{FILE}[rules]",
    ),
    Planted(
        "muon-scaled-by-rows-over-columns",
        "compiler/optimizers/muon.py",
        "scale = sqrt(max(1.0, columns / rows))",
        "scale = sqrt(max(1.0, rows / columns))",
        f"{FILE}[rules]",
    ),
    Planted(
        "muon-ahead-of-its-momentum-twice",
        "compiler/optimizers/muon.py",
        "weight = self.beta**2 if self.nesterov else self.beta",
        "weight = self.beta**2",
        f"{FILE}[rules]",
    ),
    Planted(
        "states-rounded-before-the-update",
        "runtime/kernels/quantized.py",
        "    if decay:\n        parameter.mul_(1 - rate * decay)\n    denominator",
        "    quantize(mean_now, mean, mean_scale, block, signed=True)\n"
        "    mean_now = dequantized(mean, mean_scale, block, signed=True)\n    denominator",
        f"{FILE}[rules]",
    ),
    Planted(
        "blocks-of-what-a-rank-stores",
        "compiler/optimizers/adamw_8bit.py",
        "        return whole and scales.has(axis) and scales.axis(axis).size % parts == 0\n",
        "        return scales.has(axis)\n",
        f"{FILE}[rules-1]",
    ),
    Planted(
        "codes-of-squares-are-signed",
        "runtime/kernels/quantized.py",
        "quantize(square_now, square, square_scale, block, signed=False)",
        "quantize(square_now, square, square_scale, block, signed=True)",
        f"{FILE}[rules-1]",
    ),
    Planted(
        "rows-by-the-squares-of-one-part",
        "compiler/optimizers/rowwise_adagrad.py",
        '(build.apply(Reduce("sum", others, parameter.dtype), squares) if others else squares,)',
        '(build.apply(Reduce("max", others, parameter.dtype), squares) if others else squares,)',
        f"{FILE}[rules]",
    ),
    Planted(
        "rows-of-all-tables-of-a-stack-are-one",
        "compiler/ops/lookup.py",
        "return tuple(name for name in table.names if name == self.over or ids.has(name)) if position == 1 else ()",
        "return (self.over,) if position == 1 else ()",
        f"{FILE}[rules]",
    ),
    Planted(
        "nothing-is-frozen",
        "compiler/passes/assign.py",
        "evolve(each, frozen=not each.buffer and each.name not in updates)",
        "evolve(each, frozen=False)",
        f"{ASSIGN}::test_what_is_frozen_costs_neither_gradient_nor_state_nor_backward",
    ),
    Planted(
        "gradients-of-what-is-frozen",
        "compiler/passes/differentiate.py",
        "trained = [p for p in graph.parameters if p.trained]",
        "trained = [p for p in graph.parameters if not p.buffer]",
        f"{ASSIGN}::test_what_is_frozen_costs_neither_gradient_nor_state_nor_backward",
    ),
    Planted(
        "the-last-rule-that-matches",
        "compiler/passes/assign.py",
        "target = next((each for each in targets if each.matches(parameter, as_trained)), None)",
        "target = next((each for each in reversed(targets) if each.matches(parameter, as_trained)), None)",
        f"{FILE}[rules-1]",
    ),
    Planted(
        "rates-by-the-place-of-the-rule",
        "compiler/passes/assign.py",
        "rate=target.rule.index)",
        "rate=max(0, target.rule.index - 1))",
        f"{FILE}[rules]",
    ),
    Planted(
        "tied-parameters-are-no-matrices",
        "compiler/passes/assign.py",
        "return parameter.matrix is not None and len(parameter.type.axes) > 1",
        "return parameter.matrix is not None and len(parameter.type.axes) > 1 and not parameter.rows",
        ASSIGN,
    ),
    Planted(
        "what-is-a-stack-is-summed",
        "compiler/passes/readers.py",
        "tuple(name for name in names if name in stacked - inner),",
        "(),",
        f"{FILE}[rules]",
    ),
    Planted(
        "the-last-product-says-what-a-matrix-is",
        "compiler/passes/readers.py",
        "            found = each.node.op.matrix([operand.type for operand in each.node.inputs], each.position)\n"
        "            if found is not None:\n",
        "            found = each.node.op.matrix([operand.type for operand in each.node.inputs], each.position)\n"
        "            if found is not None and each is self.readers[value][-1]:\n",
        f"{FILE}[rules]",
    ),
    Planted(
        "means-without-correction",
        "runtime/kernels/optimizers.py",
        "return mean.lerp_(parameter, (1 - decay) / (1 - decay**update))",
        "return mean.lerp_(parameter, 1 - decay)",
        f"{FILE}[rules]",
    ),
    Planted(
        "means-of-the-values-before",
        "compiler/passes/update.py",
        "self._apply(Ema(self.ema), mean, new, layout=layout",
        "self._apply(Ema(self.ema), mean, part, layout=layout",
        SPLIT,
    ),
    Planted(
        "means-begin-at-zero",
        "compiler/codegen/plan.py",
        "sizes), name == EMA) for name, state in named),",
        "sizes)) for name, state in named),",
        SPLIT,
    ),
    Planted(
        "evaluation-reads-what-is-trained",
        "runtime/rank.py",
        "                masters[name] = mean\n",
        "                pass\n",
        f"{FILE}[rules]",
    ),
    Planted(
        "means-stay-as-they-were-when-rewound",
        "runtime/rank.py",
        "tensor.copy_(self._initial(name, record.stored(state))) if state.copy else tensor.zero_()",
        "tensor.zero_()",
        f"{MEANS}::test_back_at_the_beginning_means_are_the_initial_values",
    ),
    Planted(
        "imported-means-are-zero",
        "runtime/checkpoint/importing.py",
        "name = tensor.name if tensor.name in parts else means.get(tensor.name, tensor.name)",
        "name = tensor.name",
        f"{MEANS}::test_export_of_the_means_and_import_of_parameters",
    ),
    Planted(
        "exported-means-of-nothing",
        "runtime/checkpoint/exchange.py",
        "commit.read(source.get(tensor.name, tensor.name))",
        "commit.read(tensor.name)",
        f"{MEANS}::test_export_of_the_means_and_import_of_parameters",
    ),
]
