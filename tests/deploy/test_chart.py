"""The chart and the kustomize base, through the tools that a cluster's operators use."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.processes.child_processes import PYTHON_MODULE
from tests.deploy.conftest import CHART, ROOT, Document, problems_of, render, run, tool
from tests.deploy.pods import allowed_ports
from tools.kustomize_base import BASES

pytestmark = [pytest.mark.large, pytest.mark.timeout(1500)]

SCHEMA: Document = json.loads((CHART / "values.schema.json").read_text())
NUM_VALUE_SETS = 32
# Checks of checkov that the chart does not pass, and why.
ACCEPTED = {
    "CKV_K8S_11": "no CPU limit: a throttled engine loop misses its beats",
    "CKV_K8S_15": "images are named by digest or version, and not pulled each time",
    "CKV_K8S_35": "tokens come from Secrets as variables: programs take them so",
    "CKV_K8S_40": "the user's id is the image's own, above 10000",
    "CKV_K8S_43": "the digest is the operator's to give (images.*.digest)",
}


Place = tuple[str, ...]


def leaves(schema: Document, path: Place = ()) -> Iterator[tuple[Place, Document]]:
    """Everything in the schema whose values can be drawn, with where it is in the values."""
    if "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    kind = schema.get("type")
    is_text = kind == "string" and "pattern" in schema
    if "enum" in schema or kind in ("boolean", "integer") or is_text:
        yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from leaves(inner, (*path, name))


def value_of(schema: Document) -> st.SearchStrategy[Any]:
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if schema["type"] == "boolean":
        return st.booleans()
    if schema["type"] == "integer":
        least = schema.get("minimum", 0)
        return st.integers(least, schema.get("maximum", least + 1000))
    text = st.from_regex(schema["pattern"], fullmatch=True, alphabet=st.characters(codec="ascii"))
    return text.filter(lambda one: len(one) <= schema.get("maxLength", 60))


LEAVES = [(path, schema) for path, schema in leaves(SCHEMA) if path and path[0] != "global"]


@st.composite
def value_sets(draw: st.DrawFn) -> Document:
    """Some of the values, as the schema allows them."""
    values: Document = {}
    for path, schema in LEAVES:
        if draw(st.integers(0, 3)):
            continue
        inner = values
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = draw(value_of(schema))
    ports = values.get("kv", {}).get("ucx", {}).get("portRange")
    if ports is not None:
        low, high = sorted((ports.get("from", 41000), ports.get("to", 41099)))
        values["kv"]["ucx"]["portRange"] = {"from": low, "to": high}
    kv = values.get("kv", {})
    if kv.get("encodingsPort", 7101) == kv.get("port", 7100):
        kv["encodingsPort"] = 7102 if kv["port"] != 7102 else 7103
    for role in ("prefill", "decode", "encode"):
        scaled = values.get("autoscaling", {}).get(role)
        if scaled is not None:
            low, high = sorted((scaled.get("minReplicas", 1), scaled.get("maxReplicas", 8)))
            scaled |= {"minReplicas": low, "maxReplicas": high}
    return values


def test_the_schema_is_drawn_from_widely() -> None:
    assert len(LEAVES) > 50
    roots = {path[0] for path, _ in LEAVES}
    assert roots >= {
        "tls", "kv", "router", "prefill", "decode", "encode", "autoscaling", "networkPolicy",
    }  # fmt: skip


@settings(
    max_examples=NUM_VALUE_SETS, deadline=None, suppress_health_check=list(HealthCheck),
    derandomize=True,
)  # fmt: skip
@given(value_sets())
def test_whatever_the_schema_allows_renders_lints_and_is_what_kubernetes_takes(
    values: Document,
) -> None:
    run(tool("helm"), "lint", "--strict", str(CHART), "--values", "-", given=json.dumps(values))
    documents = render(values)
    assert problems_of(documents) == []
    check_what_no_schema_says(documents)


def check_what_no_schema_says(documents: list[Document]) -> None:
    """Objects find each other, and grace periods are longer than the way out."""
    by_kind: dict[str, list[Document]] = {}
    for document in documents:
        by_kind.setdefault(document["kind"], []).append(document)
    names = [(one["kind"], one["metadata"]["name"]) for one in documents]
    assert len(names) == len(set(names))
    workloads = {one["metadata"]["name"]: one for one in by_kind["Deployment"]}
    has_encode = any(name.endswith("-encode") for name in workloads)
    assert len(workloads) == 3 + has_encode
    arguments_of = {
        name.rpartition("-")[2]: one["spec"]["template"]["spec"]["containers"][0]["args"]
        for name, one in workloads.items()
    }
    assert ("--encode-nodes" in arguments_of["prefill"]) == has_encode
    revisions = set()
    for workload in workloads.values():
        template = workload["spec"]["template"]
        labels = template["metadata"]["labels"].items()
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        (container,) = template["spec"]["containers"]
        arguments = dict(one.partition("=")[::2] for one in container["args"])
        sleep = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        out_s = float(sleep[1]) if sleep else 0.0
        out_s += float(arguments.get("--drain-delay-s", 0)) + float(arguments["--drain-timeout-s"])
        assert template["spec"]["terminationGracePeriodSeconds"] > out_s
        if "--revision" in arguments:
            assert "--ready-with-peer" in arguments
            revisions.add(arguments["--revision"])
            assert workload["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in template["spec"]["volumes"]}
    assert len(revisions) == 1, "one for both roles"
    assert "" not in revisions
    for scaler in (*by_kind.get("ScaledObject", ()), *by_kind.get("HorizontalPodAutoscaler", ())):
        target = workloads[scaler["spec"]["scaleTargetRef"]["name"]]
        assert "replicas" not in target["spec"], "two would fight over it"
    for service in by_kind["Service"]:
        selector = service["spec"]["selector"].items()
        selected = [
            one
            for one in workloads.values()
            if selector <= one["spec"]["template"]["metadata"]["labels"].items()
        ]
        (workload,) = selected
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        ports = {port["name"] for port in container["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"kv": {"ucx": {"portRange": {"from": 5000, "to": 4000}}}}, "from 5000 is after to 4000"),
        ({"autoscaling": {"prefill": {"enabled": True, "minReplicas": 9}}}, "above maxReplicas"),
        ({"prefill": {"replicas": -1}}, "replicas"),
        ({"prefil": {}}, "prefil"),
        ({"kv": {"connector": "smoke"}}, "connector"),
        ({"prefill": {"extraVolumes": [{"name": "kv"}]}}, "minProperties"),
        ({"decode": {"extraVolumeMounts": [{"name": "kv"}]}}, "missing property 'mountPath'"),
        (
            {"router": {"extraVolumes": [{"name": "tmp", "emptyDir": {}}]}},
            "router.extraVolumes: the chart has a volume tmp of its own; choose another name",
        ),
        (
            {"config": {"kv_files": "/cache/kv", "kv_files_size": "10G"}},
            "prefill: kv_files_size 10G: must be less than cacheSize 4Gi, "
            "the limit of the volume of kv_files /cache/kv",
        ),
        (
            {"decode": {"args": ["--kv-files=/cache/kv", "--kv-files-size=4096MiB"]}},
            "decode: kv_files_size 4096MiB: must be less than cacheSize 4Gi",
        ),
        ({"kv": {"port": 7101}, "encode": {"replicas": 1}}, "must differ from kv.port 7101"),
        (
            {
                "kv": {"port": 7101},
                "autoscaling": {"encode": {"enabled": True}},
                "networkPolicy": {"enabled": False},
            },
            "must differ from kv.port 7101",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(values: Document, problem: str) -> None:
    command = [tool("helm"), "template", "x", str(CHART), "--values", "-"]
    done = subprocess.run(
        command, input=json.dumps(values), capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode != 0
    assert problem in done.stderr


def test_ports_of_encodings_are_free_where_no_encode_node_is() -> None:
    documents = render({"kv": {"port": 7101}})
    assert ("TCP", 7101) in allowed_ports(documents, "decode")


def test_encode_nodes_come_with_their_policy_budget_scaler_and_certificate() -> None:
    assert not [one for one in render({}) if one["metadata"]["name"].endswith("-encode")]
    documents = render({
        "encode": {"replicas": 2}, "autoscaling": {"encode": {"enabled": True}},
        "monitoring": {"enabled": True},
    })  # fmt: skip
    assert problems_of(documents) == []
    own = [one for one in documents if one["metadata"]["name"] == "baton-encode"]
    assert {one["kind"] for one in own} == {
        "ServiceAccount", "Service", "PodDisruptionBudget", "Deployment", "NetworkPolicy",
        "ScaledObject", "Certificate", "PodMonitor",
    }  # fmt: skip
    assert ("TCP", 7101) in allowed_ports(documents, "prefill")
    assert ("TCP", 7100) in allowed_ports(documents, "encode")
    (deployment,) = (one for one in own if one["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["baton", "encode"]
    (prefill,) = (
        one
        for one in documents
        if (one["kind"], one["metadata"]["name"]) == ("Deployment", "baton-prefill")
    )
    given = prefill["spec"]["template"]["spec"]["containers"][0]["args"]
    assert {"--encode-nodes", "--encodings-listen=$(POD_IP):7101"} <= set(given)


def test_a_change_of_one_role_is_a_new_revision_of_both_and_a_replica_is_none() -> None:
    def revision(values: Document) -> set[str]:
        return {
            argument
            for document in render(values)
            if document["kind"] == "Deployment"
            for argument in document["spec"]["template"]["spec"]["containers"][0]["args"]
            if argument.startswith("--revision=")
        }

    usual = revision({})
    assert len(usual) == 1
    assert revision({"prefill": {"replicas": 7}, "decode": {"maxSurge": 2}}) == usual
    assert revision({"router": {"drainTimeoutS": 7}}) == usual
    assert revision({"encode": {"args": ["--encoder-cache-tokens=9"]}}) == usual
    for changed in (
        {"prefill": {"args": ["--block-size=32"]}},
        {"images": {"node": {"tag": "0.2.0"}}},
        {"config": {"decode": {"dtype": "float32"}}},
        {"model": {"path": "/models/other"}},
        {"encode": {"replicas": 1}},
    ):
        assert revision(changed).isdisjoint(usual), changed
    assert revision({"revision": "blue"}) == {"--revision=blue"}


def container_of(documents: list[Document], component: str) -> Document:
    """Return the container of a component's Deployment."""
    (container,) = pod_of(documents, component)["containers"]
    return dict(container)


def pod_of(documents: list[Document], component: str) -> Document:
    """Return the pod specification of a component's Deployment."""
    (found,) = (
        one
        for one in documents
        if (one["kind"], one["metadata"]["name"]) == ("Deployment", f"baton-{component}")
    )
    return dict(found["spec"]["template"]["spec"])


@pytest.mark.parametrize("component", ["router", "prefill", "decode", "encode"])
def test_a_component_gets_further_volumes_and_variables(component: str) -> None:
    volume = {"name": "kv", "emptyDir": {}}
    mount = {"name": "kv", "mountPath": "/kv"}
    source = {"secretRef": {"name": "bucket"}}
    own: Document = {
        "extraVolumes": [volume], "extraVolumeMounts": [mount], "envFrom": [source],
    }  # fmt: skip
    values: Document = {"encode": {"replicas": 1}}
    values.setdefault(component, {}).update(own)
    documents = render(values)
    assert problems_of(documents) == []
    check_what_no_schema_says(documents)
    for name in ("router", "prefill", "decode", "encode"):
        pod, container = pod_of(documents, name), container_of(documents, name)
        assert (volume in pod["volumes"]) == (name == component)
        assert (mount in container["volumeMounts"]) == (name == component)
        assert container.get("envFrom") == ([source] if name == component else None)


def examples() -> list[Document]:
    """Return the values in the section of docs/kubernetes.md on cached prefixes."""
    text = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    section = text.partition("## Cached prefixes")[2].partition("\n## ")[0]
    return [yaml.safe_load(one) for one in re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)]


def test_the_examples_of_the_documentation_are_complete() -> None:
    """Nodes have the folder or key that the options name, and may reach the bucket."""
    folder, bucket = examples()
    for values in (folder, bucket):
        documents = render(values)
        assert problems_of(documents) == []
        check_what_no_schema_says(documents)
        options = values["config"]
        path = options.get("kv_files_secret", options["kv_files"])
        for role in ("prefill", "decode"):
            mounts = container_of(documents, role)["volumeMounts"]
            assert [one for one in mounts if path.startswith(one["mountPath"])]
    for role in ("prefill", "decode"):
        container = container_of(documents, role)
        assert container["envFrom"] == [{"secretRef": {"name": "baton-kv-bucket"}}]
        (policy,) = (
            one
            for one in documents
            if (one["kind"], one["metadata"]["name"]) == ("NetworkPolicy", f"baton-{role}")
        )
        assert {"ports": [{"port": 443, "protocol": "TCP"}]} in policy["spec"]["egress"]


@pytest.mark.parametrize(
    ("values", "prefill", "decode"),
    [
        ({"config": {"kv_files": "/cache/kv"}}, "3221225472", "3221225472"),
        ({"config": {"kv_files": "/cache/kv", "kv_files_size": "2G"}}, "2G", "2G"),
        (
            {"config": {"kv_files": "/cache/kv"}, "prefill": {"cacheSize": "100G"}},
            "75000000000", "3221225472",
        ),
        ({"config": {"decode": {"kv_files": "/tmp/kv"}}}, "auto", "805306368"),
        ({"prefill": {"args": ["--kv-files", "/dev/shm/kv"]}}, "805306368", "auto"),
        (
            {"decode": {"env": [{"name": "BATON_KV_FILES", "value": "/cache/kv"}]}},
            "auto", "3221225472",
        ),
        (
            {
                "config": {"kv_files": "/cache/kv"},
                "prefill": {
                    "extraVolumes": [{"name": "kv", "emptyDir": {}}],
                    "extraVolumeMounts": [{"name": "kv", "mountPath": "/cache/kv"}],
                },
            },
            "auto", "3221225472",
        ),
        ({"config": {"kv_files": "/cached"}}, "auto", "auto"),
    ],
)  # fmt: skip
def test_files_with_kv_fit_into_the_volume_that_has_them(
    values: Document, prefill: str, decode: str, tmp_path: Path
) -> None:
    documents = render(values)
    (config,) = (one for one in documents if one["kind"] == "ConfigMap")
    (tmp_path / "baton.toml").write_text(config["data"]["baton.toml"])
    for role, size in (("prefill", prefill), ("decode", decode)):
        assert size_of_files(container_of(documents, role), tmp_path) == size


def size_of_files(container: Document, folder: Path) -> str:
    """Return the value of --kv-files-size that a node reads from its command line and its file."""
    _, role = container["command"]
    arguments = [one.replace("/etc/baton/", f"{folder}/") for one in container["args"]]
    given = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    done = subprocess.run(
        [*PYTHON_MODULE, "baton", "config", "show", role, *arguments],
        env=os.environ | given, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    shown = dict(line.split(None, 2)[:2] for line in done.stdout.splitlines() if " " in line)
    return shown["kv_files_size"]


@pytest.mark.parametrize("name", list(BASES))
def test_the_kustomize_bases_are_what_the_chart_makes(name: str) -> None:
    """`python -m tools.kustomize_base` makes them."""
    base = run(tool("kubectl"), "kustomize", str(ROOT / "deploy" / "kustomize" / name))

    def by_name(documents: list[Document]) -> dict[tuple[str, str], Document]:
        return {(one["kind"], one["metadata"]["name"]): one for one in documents}

    assert by_name(list(yaml.safe_load_all(base))) == by_name(render(BASES[name]))


def test_checkov_finds_nothing_that_is_not_accepted(tmp_path: Path) -> None:
    path = tmp_path / "all.yaml"
    path.write_text(yaml.safe_dump_all(render({})))
    command = [tool("checkov"), "--file", str(path), "--framework", "kubernetes"]
    text = run(*command, "--output", "json", "--compact", "--quiet", "--soft-fail")
    found = json.loads(text[text.index("{") :] if not text.startswith("[") else text)
    failed = found["results"]["failed_checks"]
    unexpected = {
        f"{one['check_id']} {one['check_name']}: {one['resource']}"
        for one in failed
        if one["check_id"] not in ACCEPTED
    }
    assert unexpected == set()
    assert found["summary"]["passed"] > 100


@pytest.mark.parametrize("name", ["router", "node"])
def test_hadolint_is_content(name: str) -> None:
    run(tool("hadolint"), str(ROOT / "deploy" / "docker" / f"{name}.Dockerfile"))
