"""Manifests and scripts in docs/running.md: manifests have only fields of the published models, of the right types, and
all that are required.

`kubernetes.json` holds the fields of the models, and where they are from.
"""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from partita.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "running.md"
TYPES = json.loads((Path(__file__).parent / "kubernetes.json").read_text())["types"]
POD = "IoK8sApiCoreV1PodTemplateSpec"
ROOTS = {"PyTorchJob": "KubeflowOrgV1PyTorchJob", "JobSet": "JobsetV1alpha2JobSet", "Job": "VolcanoJob"}
SCALARS = {"string": str, "integer": int, "boolean": bool}


def fences(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.M | re.S)


MANIFESTS = {each["kind"]: each for each in map(yaml.safe_load, fences("yaml"))}


def problems(value: Any, kind: Any, at: str) -> Iterator[str]:
    """Where a value is not of a type."""
    if kind == "any":
        return
    if isinstance(kind, dict):
        ((form, inner),) = kind.items()
        if form == "enum":
            if value not in inner:
                yield f"{at} is none of {', '.join(inner)}"
            return
        if not isinstance(value, list if form == "list" else dict):
            yield f"{at} is no {form}"
            return
        for key, each in enumerate(value) if form == "list" else value.items():
            yield from problems(each, inner, f"{at}.{key}")
    elif kind in SCALARS:
        if type(value) is not SCALARS[kind]:
            yield f"{at} is no {kind}"
    elif not isinstance(value, dict):
        yield f"{at} is no {kind}"
    else:
        fields = TYPES[kind]
        yield from (f"{at} has no field {name}" for name in value.keys() - fields.keys())
        yield from (f"{at}.{name} is missing" for name, (_, needed) in fields.items() if needed and name not in value)
        for name in value.keys() & fields.keys():
            yield from problems(value[name], fields[name][0], f"{at}.{name}")


def pods(value: Any) -> Iterator[dict[str, Any]]:
    """All pod templates in a manifest."""
    if isinstance(value, dict):
        if "containers" in value.get("spec", {}):
            yield value
        for each in value.values():
            yield from pods(each)
    elif isinstance(value, list):
        for each in value:
            yield from pods(each)


def test_there_are_all() -> None:
    assert set(MANIFESTS) == {"PyTorchJob", "JobSet", "Job"}


@pytest.mark.parametrize("kind", ROOTS)
def test_a_manifest_fits_the_published_model(kind: str) -> None:
    manifest = deepcopy(MANIFESTS[kind])
    if kind == "PyTorchJob":
        manifest["spec"].setdefault("runPolicy", {})  # the model wants it, the operator fills it in
    assert list(problems(manifest, ROOTS[kind], kind)) == []


@pytest.mark.parametrize("kind", MANIFESTS)
def test_pods_have_time_to_save(kind: str) -> None:
    found = list(pods(MANIFESTS[kind]))
    assert found
    for pod in found:
        assert list(problems(pod, POD, "pod")) == []
        (container,) = pod["spec"]["containers"]
        command = container["command"]
        assert int(command[command.index("--grace") + 1]) < pod["spec"]["terminationGracePeriodSeconds"]


@pytest.mark.parametrize(
    ("kind", "old", "new", "problem"),
    [
        (
            "PyTorchJob",
            "terminationGracePeriodSeconds: 120",
            "terminationGracePeriod: 120",
            "has no field terminationGracePeriod",
        ),
        (
            "PyTorchJob",
            "terminationGracePeriodSeconds: 120",
            'terminationGracePeriodSeconds: "120"',
            "is no integer",
        ),
        ("PyTorchJob", "name: pytorch ", "nam: pytorch ", "containers.0.name is missing"),
        ("Job", "maxRetry: 100", "maxRetries: 100", "has no field maxRetries"),
        ("Job", "event: PodEvicted", "event: Evicted", "policies.0.event is none of"),
        ("Job", '"--port=29500"]', "29500]", "plugins.pytorch.2 is no string"),
    ],
)
def test_mistakes_are_found(kind: str, old: str, new: str, problem: str) -> None:
    (text,) = (each for each in fences("yaml") if f"kind: {kind}\n" in each)
    assert old in text
    manifest = yaml.safe_load(text.replace(old, new))
    manifest["spec"].setdefault("runPolicy", {})
    assert any(problem in each for each in problems(manifest, ROOTS[kind], "job"))


def test_scripts_parse() -> None:
    for script in fences("bash"):
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_the_commands_have_these_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    known = capsys.readouterr().out
    for pod in (pod for each in MANIFESTS.values() for pod in pods(each)):
        options = [each for each in pod["spec"]["containers"][0]["command"] if each.startswith("--")]
        assert options
        assert all(each in known for each in options)


def test_the_dockerfile_names_what_there_is() -> None:
    """It is read, not built: instructions that exist, extras of the package, shell that parses."""
    text = (PAGE.parents[1] / "Dockerfile").read_text()
    lines = [line for line in re.sub(r"\\\n", " ", text).splitlines() if line and not line.startswith("#")]
    assert [line.split()[0] for line in lines[:2]] == ["ARG", "FROM"]
    assert {line.split()[0] for line in lines} <= {"FROM", "ARG", "ENV", "RUN", "COPY", "WORKDIR", "CMD"}
    for line in lines:
        instruction, _, rest = line.partition(" ")
        if instruction == "RUN":
            assert subprocess.run(["bash", "-n"], input=rest, text=True, check=False).returncode == 0
        if instruction == "CMD":
            assert json.loads(rest)[0] == "partita"
    (extras,) = re.findall(r"/src\[([\w,]+)\]", text)
    project = tomllib.loads((PAGE.parents[1] / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
