"""Files for deployment: they parse, their flags exist, and the scripts really run, with stand-ins for ssh and Slurm."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
from typing import Any

import pytest
import yaml
from program_flags import INSTALLED, flags_of
from workers import PATIENCE, _workers_start_fast  # noqa: F401 (a fixture)

from dapple_tf.network.worker_process import START_SECONDS
from dapple_tf.tools.hosts import ROOT, environment, free_ports, launch

DEPLOY = ROOT / "docs" / "deploy"
TEXTS = {path: path.read_text(encoding="utf-8") for path in sorted([*DEPLOY.iterdir(), ROOT / "docs" / "cluster.md"])}
SCRIPTS = [DEPLOY / "ssh.sh", DEPLOY / "slurm.sbatch"]
PROGRAM = """
import os, signal, sys
if os.environ.get("DIES") and "SLURM_RESTART_COUNT" not in os.environ:
    os.killpg(0, signal.SIGKILL)  # the node with all that runs on it
print(len(os.listdir(os.environ["DAPPLE_TF_TLS"])) if "DAPPLE_TF_TLS" in os.environ else "bare")
print(os.environ["TF_CONFIG"])
"""


def joined(text: str) -> str:
    """Lines of shell with those that go on in the next one put together, and without comments' marks."""
    return re.sub(r"\\\n\s*", " ", text).replace("# ", "  ")


def used_flags() -> list[tuple[str, str, str]]:
    flags = []
    programs = rf"(?:-m |\b)(dapple_tf\.worker|tools\.\w+|{'|'.join(INSTALLED)})\b([^\n]*)"
    for path, text in TEXTS.items():
        for program, rest in re.findall(programs, joined(text)):
            module = INSTALLED.get(program, program)
            flags += [(path.name, module, flag) for flag in re.findall(r"--(\w+)", rest.split(" -- ")[0])]
    return flags


def test_flags_exist() -> None:
    used = {*used_flags()}
    assert {file for file, _, _ in used} >= {"ssh.sh", "slurm.sbatch", "wireguard.conf", "cluster.md"}
    assert not [(file, module, flag) for file, module, flag in used if flag not in flags_of(module)]


# ---- Kubernetes


@functools.cache
def manifests() -> dict[str, dict[str, Any]]:
    """Kind and name -> what the file says of it."""
    documents = list(yaml.safe_load_all(TEXTS[DEPLOY / "kubernetes.yaml"]))
    return {f"{document['kind']} {document['metadata']['name']}": document for document in documents}


def pods_of(job: str) -> dict[str, Any]:
    pod: dict[str, Any] = manifests()[f"Job {job}"]["spec"]["template"]
    return pod


def test_kubernetes_file_is_as_its_schemas_say() -> None:
    library = pytest.importorskip(
        "kubernetes_validate", reason="needs Kubernetes' schemas: kubernetes-validate isn't installed (make venv)"
    )
    assert len(manifests()) == 6
    for document in manifests().values():
        library.validate(document, "1.29", strict=True)


def test_pods_have_few_rights_limits_and_keys_and_talk_to_each_other_only() -> None:
    spec = manifests()["NetworkPolicy dapple"]["spec"]
    allowed = {"matchLabels": {"app": "dapple"}}
    assert spec == {
        "podSelector": allowed,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": allowed}]}],
    }
    for pod in map(pods_of, ("workers", "client")):
        assert pod["metadata"]["labels"]["app"] == "dapple"
        spec = pod["spec"]
        user = spec["securityContext"]
        assert user["runAsNonRoot"] and user["runAsUser"] > 0 and user["fsGroup"] == user["runAsGroup"]
        assert spec["automountServiceAccountToken"] is False and not spec.get("hostNetwork")
        for container in (*spec["containers"], *spec.get("initContainers", ())):
            rights = container["securityContext"]
            assert rights["allowPrivilegeEscalation"] is False and rights["readOnlyRootFilesystem"] is True
            assert rights["capabilities"] == {"drop": ["ALL"]}
            assert set(container["resources"]["limits"]) == {"cpu", "memory"}
            assert container["resources"]["requests"] == container["resources"]["limits"]
        (secret,) = [volume["secret"] for volume in spec["volumes"] if "secret" in volume]
        assert secret == {"secretName": "dapple-tls", "defaultMode": 0o440}
        (container,) = spec["containers"]
        (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "tls"]
        told = "--tls=" + mount["mountPath"] in container.get("args", ())
        assert told or {"name": "DAPPLE_TF_TLS", "value": mount["mountPath"]} in container["env"]


def test_the_workers_are_found_by_their_names() -> None:
    workers, service = manifests()["Job workers"], manifests()["Service workers"]
    name, port = service["metadata"]["name"], service["spec"]["ports"][0]["port"]
    assert service["spec"]["clusterIP"] == "None"
    pod = workers["spec"]["template"]
    assert pod["spec"]["subdomain"] == name
    assert pod["metadata"]["labels"] == service["spec"]["selector"]
    (container,) = pod["spec"]["containers"]
    for argument in container["args"]:
        assert re.match(r"--(\w+)=", argument)[1] in flags_of("dapple_tf.worker")  # type: ignore[index]
    assert f"--address=$(POD_IP):{port}" in container["args"]
    (client,) = manifests()["Job client"]["spec"]["template"]["spec"]["containers"]
    config = json.loads(next(item["value"] for item in client["env"] if item["name"] == "TF_CONFIG"))
    count = workers["spec"]["completions"]
    assert workers["spec"]["completionMode"] == "Indexed" and workers["spec"]["parallelism"] == count
    names = [f"{workers['metadata']['name']}-{number}.{name}" for number in range(count)]
    assert f"dapple-keys --directory=keys job,{','.join(names)}" in TEXTS[DEPLOY / "kubernetes.yaml"]
    wanted = [f"{name}:{port}" for name in names]
    assert config["cluster"]["worker"] == wanted


def test_workers_are_started_again_and_budgets_keep_all_but_one() -> None:
    job = manifests()["Job workers"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    start = container["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= START_SECONDS
    assert job["template"]["spec"]["restartPolicy"] == "OnFailure" and job["backoffLimit"] >= 100
    for name, count in {"workers": job["completions"] - 1, "client": 1}.items():
        # Of a Job's pods, Kubernetes accepts no maxUnavailable and no percentage.
        budget = {"minAvailable": count, "selector": {"matchLabels": pods_of(name)["metadata"]["labels"]}}
        told = manifests()[f"PodDisruptionBudget {name}"]["spec"]
        assert {key: value for key, value in told.items() if key != "unhealthyPodEvictionPolicy"} == budget


def test_a_worker_that_is_asked_to_end_has_not_completed_its_index(tmp_path: pathlib.Path) -> None:
    (container,) = manifests()["Job workers"]["spec"]["template"]["spec"]["containers"]
    stand_in(tmp_path, "python", 'echo "$@"\nexec sleep 1000\n')
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    process = launch([*container["command"], *container["args"]], stdout=subprocess.PIPE, env={"PATH": path})
    try:
        assert process.stdout is not None
        assert process.stdout.readline().split() == ["-m", "dapple_tf.worker", *container["args"]]
        process.terminate()
        assert process.wait(PATIENCE) == 1
    finally:
        # In a pod, all processes end with the first.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()


# ---- scripts


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_are_strict(script: pathlib.Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert TEXTS[script].startswith("#!/usr/bin/env bash\n") and "\nset -euo pipefail\n" in TEXTS[script]
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(script)], check=True)


def stand_in(folder: pathlib.Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text("#!/usr/bin/env bash\n" + text)
    path.chmod(0o755)


def run(folder: pathlib.Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    stand_in(folder, "python", f'exec {shlex.quote(sys.executable)} "$@"\n')
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
        env={**environment(), "PATH": path, **variables},
        start_new_session=True,
    )


@pytest.fixture
def _certificates() -> None:
    pytest.importorskip("cryptography", reason="needs certificates: cryptography isn't installed (make venv)")


@pytest.mark.usefixtures("_certificates", "_workers_start_fast")
def test_ssh_script_starts_workers_and_ends_them(tmp_path: pathlib.Path) -> None:
    (port,) = free_ports(1)
    # ssh [options] host command, here
    stand_in(tmp_path, "ssh", 'echo "$$" >>"$PIDS"\nexec bash -c "${@: -1}"\n')
    pids = tmp_path / "pids"
    command = [str(DEPLOY / "ssh.sh"), "127.0.0.1", "me@127.0.0.2", "--", "python", "-c", PROGRAM]
    done = run(tmp_path, *command, PORT=str(port), DEVICES="2", PIDS=str(pids), TLS="on", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    wanted = [f"127.0.0.1:{port}", f"127.0.0.2:{port}"]
    files, config = done.stdout.splitlines()
    assert files == "3"  # of the directory for TLS
    assert json.loads(config)["cluster"]["worker"] == wanted
    assert not list(tmp_path.glob("tmp.*"))  # No key is left, neither here nor there.
    for address in wanted:
        assert f"worker on {address}" in done.stderr
    workers = pids.read_text().split()
    assert len(workers) == 6
    assert not any(pathlib.Path("/proc", pid).exists() for pid in workers)
    assert run(tmp_path, str(DEPLOY / "ssh.sh"), "127.0.0.1").returncode == 2


@pytest.mark.usefixtures("_certificates", "_workers_start_fast")
def test_slurm_script_starts_workers_and_a_job_that_is_started_again_keeps_its_keys(tmp_path: pathlib.Path) -> None:
    assert "#SBATCH --requeue" in TEXTS[DEPLOY / "slurm.sbatch"].splitlines()
    # srun [--options] command, on one node, 127.0.0.1
    stand_in(tmp_path, "srun", 'while [[ $1 == --* ]]; do shift; done\nexec "$@"\n')
    stand_in(tmp_path, "hostname", "echo 192.168.7.1 127.0.0.1\n")
    port = next(port for port in free_ports(50) if 20_000 <= port < 30_000)  # The script makes it of the number.
    variables = {"NETWORK": "127.", "SLURM_JOB_ID": str(port - 20_000), "DIES": "1"}
    command = ["bash", str(DEPLOY / "slurm.sbatch"), "python", "-c", PROGRAM]
    keys = ROOT / f"dapple-keys-{port - 20_000}"
    try:
        first = run(tmp_path, *command, **variables)
        assert first.returncode == -signal.SIGKILL, first.stderr
        (keys / "of_the_first_start").touch()
        assert keys.stat().st_mode & 0o777 == 0o700 and (keys / "job" / "key.pem").exists()
        second = run(tmp_path, *command, SLURM_RESTART_COUNT="1", **variables)
        assert second.returncode == 0, second.stderr
        assert not keys.exists()
    finally:
        shutil.rmtree(keys, ignore_errors=True)
    worker, files, config = second.stdout.splitlines()
    assert worker.startswith(f"worker on 127.0.0.1:{port} ") and files == "3"
    assert json.loads(config)["cluster"]["worker"] == [f"127.0.0.1:{port}"]
