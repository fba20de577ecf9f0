"""Files for deployment: they parse, their flags exist, and the scripts really run, with stand-ins for ssh and Slurm."""

from __future__ import annotations

import contextlib
import copy
import functools
import ipaddress
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
from workers import PATIENCE

from dapple_tf.network.worker_process import START_SECONDS
from dapple_tf.tools.hosts import ROOT, environment, free_ports, launch

DEPLOY = ROOT / "docs" / "deploy"
TEXTS = {path: path.read_text(encoding="utf-8") for path in sorted([*DEPLOY.iterdir(), ROOT / "docs" / "cluster.md"])}
SCRIPTS = [DEPLOY / "ssh.sh", DEPLOY / "slurm.sbatch"]
PROGRAM = """
import os
import tensorflow as tf
import dapple_tf as dapple
cluster = dapple.Cluster.from_resolver(tf.distribute.cluster_resolver.TFConfigClusterResolver())
assert (cluster.tls or "") == os.environ.get("DAPPLE_TF_TLS", ""), cluster.tls
print("by TLS" if cluster.tls else "bare")
print(os.environ["TF_CONFIG"])
"""
TRAINING = """
import os, signal, sys
import keras, numpy as np
import tensorflow as tf
import dapple_tf as dapple

def build():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model

class Batches(keras.callbacks.Callback):
    count = 0

    def on_train_batch_end(self, batch, logs=None):
        self.count += 1
        if self.count == 5 and "SLURM_RESTART_COUNT" not in os.environ:
            os.killpg(0, signal.SIGKILL)  # the node with all that runs on it

x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
y = x.sum(axis=1, keepdims=True)
plain = build()
plain.fit(x, y, batch_size=4, shuffle=False, verbose=0)
cluster = dapple.Cluster.from_resolver(tf.distribute.cluster_resolver.TFConfigClusterResolver())
pipelined = dapple.transform(build(), cluster, dapple.Plan.data_parallel(1, 4))
batches = Batches()
settings = dapple.Checkpointing(sys.argv[1], every_steps=1)
pipelined.fit(
    x, y, batch_size=4, shuffle=False, verbose=0, checkpoint=settings, resume=True, callbacks=[batches]
)
pipelined.close()
pairs = zip(pipelined.model.get_weights(), plain.get_weights(), strict=True)
print(batches.count, max(float(np.abs(a - b).max()) for a, b in pairs))
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


@pytest.mark.parametrize(("file", "module", "flag"), sorted(set(used_flags())))
def test_flags_exist(file: str, module: str, flag: str) -> None:
    assert flag in set(flags_of(module)), f"{file}: {module} has no flag --{flag}"


def test_flags_are_found_at_all() -> None:
    files = {file for file, _, _ in used_flags()}
    assert files >= {"ssh.sh", "slurm.sbatch", "wireguard.conf", "cluster.md"}


# ---- Kubernetes


@functools.cache
def manifests() -> dict[str, dict[str, Any]]:
    """Kind and name -> what the file says of it."""
    documents = list(yaml.safe_load_all(TEXTS[DEPLOY / "kubernetes.yaml"]))
    return {f"{document['kind']} {document['metadata']['name']}": document for document in documents}


def pods() -> list[dict[str, Any]]:
    return [manifests()[name]["spec"]["template"] for name in ("Job workers", "Job client")]


def test_kubernetes_has_all_parts() -> None:
    assert set(manifests()) == {
        "Service workers",
        "NetworkPolicy dapple",
        "PodDisruptionBudget workers",
        "PodDisruptionBudget client",
        "Job workers",
        "Job client",
    }


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_kubernetes_file_is_as_its_schemas_say(version: str) -> None:
    library = pytest.importorskip(
        "kubernetes_validate", reason="needs Kubernetes' schemas: kubernetes-validate isn't installed (make venv)"
    )
    for document in manifests().values():
        library.validate(document, version, strict=True)
    # They'd notice what nobody knows.
    wrong = copy.deepcopy(manifests()["Job workers"])
    wrong["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["period"] = 5
    with pytest.raises(library.ValidationError, match="period"):
        library.validate(wrong, version, strict=True)


def test_only_the_jobs_pods_get_in() -> None:
    spec = manifests()["NetworkPolicy dapple"]["spec"]
    allowed = {"matchLabels": {"app": "dapple"}}
    assert spec == {
        "podSelector": allowed,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": allowed}]}],
    }
    for pod in pods():
        assert pod["metadata"]["labels"]["app"] == "dapple"


def test_pods_have_few_rights_and_limits() -> None:
    for pod in pods():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
        assert spec["automountServiceAccountToken"] is False
        assert not spec.get("hostNetwork")
        volumes = {volume["name"] for volume in spec["volumes"]}
        for container in (*spec["containers"], *spec.get("initContainers", ())):
            rights = container["securityContext"]
            assert rights["allowPrivilegeEscalation"] is False and rights["readOnlyRootFilesystem"] is True
            assert rights["capabilities"] == {"drop": ["ALL"]}
            assert set(container["resources"]["limits"]) == {"cpu", "memory"}
            assert container["resources"]["requests"] == container["resources"]["limits"]
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes


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


def test_workers_are_looked_at_and_started_again() -> None:
    job = manifests()["Job workers"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    ports = {port["name"] for port in container["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["tcpSocket"]["port"] in ports
    start = container["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= START_SECONDS
    assert job["template"]["spec"]["restartPolicy"] == "OnFailure" and job["backoffLimit"] >= 100


def test_budgets_keep_all_workers_but_one_and_the_client() -> None:
    counts = {"workers": manifests()["Job workers"]["spec"]["completions"] - 1, "client": 1}
    for name, count in counts.items():
        budget = manifests()[f"PodDisruptionBudget {name}"]["spec"]
        labels = manifests()[f"Job {name}"]["spec"]["template"]["metadata"]["labels"]
        assert budget["selector"]["matchLabels"] == labels
        # Of a Job's pods, Kubernetes accepts no maxUnavailable and no percentage.
        assert type(budget["minAvailable"]) is int and budget["minAvailable"] == count
        assert "maxUnavailable" not in budget


@pytest.mark.parametrize("ends", ["by itself", "when it is asked to"])
def test_a_worker_that_ends_has_not_completed_its_index(ends: str, tmp_path: pathlib.Path) -> None:
    (container,) = manifests()["Job workers"]["spec"]["template"]["spec"]["containers"]
    stand_in(tmp_path, "python", 'echo "$@"\n' + ("" if ends == "by itself" else "exec sleep 1000\n"))
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    process = launch([*container["command"], *container["args"]], stdout=subprocess.PIPE, env={"PATH": path})
    try:
        assert process.stdout is not None
        assert process.stdout.readline().split() == ["-m", "dapple_tf.worker", *container["args"]]
        if ends != "by itself":
            process.terminate()
        assert process.wait(PATIENCE) == 1
    finally:
        # In a pod, all processes end with the first.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()


def test_all_pods_have_keys_and_use_them() -> None:
    for pod in pods():
        spec = pod["spec"]
        (secret,) = [volume["secret"] for volume in spec["volumes"] if "secret" in volume]
        assert secret == {"secretName": "dapple-tls", "defaultMode": 0o440}
        assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsGroup"]
        (container,) = spec["containers"]
        (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "tls"]
        told = "--tls=" + mount["mountPath"] in container.get("args", ())
        assert told or {"name": "DAPPLE_TF_TLS", "value": mount["mountPath"]} in container["env"]


# ---- WireGuard


def test_wireguard_file() -> None:
    lines = [line.partition("#")[0].strip() for line in TEXTS[DEPLOY / "wireguard.conf"].splitlines()]
    settings = dict(line.split(" = ", 1) for line in lines if " = " in line)
    assert [line for line in lines if line.startswith("[")] == ["[Interface]", "[Peer]"]
    network = ipaddress.ip_interface(settings["Address"]).network
    assert network.is_private
    # Only the peer itself, not all that it sends for others.
    peer = ipaddress.ip_network(settings["AllowedIPs"])
    assert peer.num_addresses == 1 and peer.subnet_of(network)  # type: ignore[arg-type]


# ---- scripts


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_are_strict(script: pathlib.Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    lines = TEXTS[script].splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines
    for line in lines:
        # Unquoted expansions are split and globbed; in assignments, arithmetic and single quotes they aren't.
        code = re.sub(r"\\.|^\s*#.*", "", line)
        code = re.sub(r"'[^']*'|\"[^\"]*\"|\(\(.*\)\)|\[\[.*\]\]", "", code)
        code = re.sub(r"\b\w+\+?=\S+", "", code)
        assert not re.search(r"\$[A-Za-z{@*]", code), line
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


def require_keys(tls: str) -> None:
    if tls == "on":
        pytest.importorskip("cryptography", reason="needs certificates: cryptography isn't installed (make venv)")


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("tls", ["on", "off"])
def test_ssh_script_starts_workers_and_ends_them(tls: str, tmp_path: pathlib.Path) -> None:
    require_keys(tls)
    (port,) = free_ports(1)
    # ssh [options] host command, here
    stand_in(tmp_path, "ssh", 'echo "$$" >>"$PIDS"\nexec bash -c "${@: -1}"\n')
    pids = tmp_path / "pids"
    done = run(
        tmp_path,
        *[str(DEPLOY / "ssh.sh"), "127.0.0.1", "me@127.0.0.2", "--", "python", "-c", PROGRAM],
        PORT=str(port),
        DEVICES="2",
        PIDS=str(pids),
        TLS=tls,
        TMPDIR=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    wanted = [f"127.0.0.1:{port}", f"127.0.0.2:{port}"]
    kind, config = done.stdout.splitlines()
    assert kind == ("by TLS" if tls == "on" else "bare")
    assert json.loads(config)["cluster"]["worker"] == wanted
    assert not list(tmp_path.glob("tmp.*"))  # No key is left, neither here nor there.
    for address in wanted:
        assert f"worker on {address}" in done.stderr
    workers = pids.read_text().split()
    assert len(workers) == (6 if tls == "on" else 2)
    assert not any(pathlib.Path("/proc", pid).exists() for pid in workers)
    assert run(tmp_path, str(DEPLOY / "ssh.sh"), "127.0.0.1").returncode == 2


def slurm(folder: pathlib.Path, *command: str, **variables: str) -> tuple[int, subprocess.CompletedProcess[str]]:
    """Runs Slurm's file on one node, 127.0.0.1; returns its worker's port, too."""
    # srun [--options] command, on one node
    stand_in(folder, "srun", 'while [[ $1 == --* ]]; do shift; done\nexec "$@"\n')
    stand_in(folder, "hostname", "echo 192.168.7.1 127.0.0.1\n")
    if "SLURM_JOB_ID" not in variables:
        port = next(port for port in free_ports(50) if 20_000 <= port < 30_000)  # The script makes it of the number.
        variables["SLURM_JOB_ID"] = str(port - 20_000)
    done = run(folder, "bash", str(DEPLOY / "slurm.sbatch"), *command, NETWORK="127.", **variables)
    return 20_000 + int(variables["SLURM_JOB_ID"]), done


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("tls", ["on", "off"])
def test_slurm_script_starts_workers(tls: str, tmp_path: pathlib.Path) -> None:
    require_keys(tls)
    port, done = slurm(tmp_path, "python", "-c", PROGRAM, TLS=tls)
    assert done.returncode == 0, done.stderr
    worker, kind, config = done.stdout.splitlines()
    assert kind == ("by TLS" if tls == "on" else "bare")
    assert not list(ROOT.glob("dapple-keys-*"))
    assert worker.startswith(f"worker on 127.0.0.1:{port} ")
    assert json.loads(config)["cluster"]["worker"] == [f"127.0.0.1:{port}"]


@pytest.mark.thorough
@pytest.mark.slow
def test_a_slurm_job_that_is_started_again_goes_on_from_its_checkpoint(tmp_path: pathlib.Path) -> None:
    require_keys("on")
    assert "#SBATCH --requeue" in TEXTS[DEPLOY / "slurm.sbatch"].splitlines()
    command = ["python", "-c", TRAINING, str(tmp_path / "checkpoints")]
    port, first = slurm(tmp_path, *command)
    job = str(port - 20_000)
    keys = ROOT / f"dapple-keys-{job}"
    try:
        assert first.returncode == -signal.SIGKILL, first.stderr
        (keys / "of_the_first_start").touch()
        assert keys.stat().st_mode & 0o777 == 0o700 and (keys / "job" / "key.pem").exists()
        _, second = slurm(tmp_path, *command, SLURM_JOB_ID=job, SLURM_RESTART_COUNT="1")
        assert second.returncode == 0, second.stderr
        assert not keys.exists()
    finally:
        shutil.rmtree(keys, ignore_errors=True)
    batches, difference = second.stdout.splitlines()[-1].split()
    assert 3 <= int(batches) < 8  # of 8; a checkpoint may not have been complete yet when the first start was killed
    assert float(difference) < 1e-6
