"""What is deployed: images have what their services import, and compose file, manifests and units say what they must.

No engine, cluster or systemd is needed. tests/compose/ runs the containers.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from stack import BIN, free_port, wait_until

from quire.proto.config import SERVICES, ConfigError, parse_service_args
from quire.proto.process import FIGURES
from quire.proto.wire.keys import Keys

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DISTRIBUTIONS = {"zmq": "pyzmq"}
"""Where a distribution is not named as the module it holds."""
OPTIONAL = {"modelscope", "opentelemetry"}
"""Imported where a user asks for it; pyproject.toml has an extra for it."""
OF_AIOHTTP = {"multidict", "yarl"}
"""Of its interface: it comes with them."""


def script(name: str) -> Any:
    """A script of deploy/ as a module."""
    spec = importlib.util.spec_from_file_location(f"deploy_{name}", DEPLOY / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------- images


def source(module: str) -> tuple[Path, bool] | None:
    """The file of a module of ours, and whether it is a package."""
    base = ROOT.joinpath(*module.split(".")[1:])
    if (base / "__init__.py").is_file():
        return base / "__init__.py", True
    return (base.with_suffix(".py"), False) if base.with_suffix(".py").is_file() else None


def imports(module: str, path: Path, package: bool) -> Iterator[str]:
    """Full names of what a module imports, at its top or within a function; not what only a type checker sees."""
    todo: list[ast.AST] = [ast.parse(path.read_text("utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                base = ".".join([*parts[: len(parts) - node.level + package], *([base] if base else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names if base.startswith("quire"))


def third_party(module: str) -> set[str]:
    """Distributions that a module and all it can import of ours import."""
    seen: set[str] = set()
    found: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if not name or name in seen:
            continue
        seen.add(name)
        top = name.partition(".")[0]
        if top != "quire":
            if top not in sys.stdlib_module_names:
                found.add(DISTRIBUTIONS.get(top, top))
        elif place := source(name):
            todo += imports(name, *place)
            todo.append(name.rpartition(".")[0])
    return found


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_has_what_its_service_imports_and_nothing_else(service):
    assert set(script("requirements").NEEDS[service]) == third_party(f"quire.{service}.main") - OPTIONAL - OF_AIOHTTP


@pytest.mark.parametrize("command", ["keygen", "workers"])
def test_the_scheduler_s_image_has_what_operators_need(command):
    assert third_party(f"quire.cli.{command}") <= set(script("requirements").NEEDS["scheduler"])


def test_versions_are_those_of_pyproject():
    requirements = script("requirements")
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for service in SERVICES:
        assert set(requirements.requirements(service, ROOT / "pyproject.toml")) <= set(lines)


def test_an_image_has_the_extras_that_are_asked_for():
    pyproject = ROOT / "pyproject.toml"
    tracing = tomllib.loads(pyproject.read_text())["project"]["optional-dependencies"]["tracing"]
    for service in SERVICES:
        requirements = script("requirements").requirements
        assert requirements(service, pyproject, " tracing,") == requirements(service, pyproject) + tracing
        assert f'requirements.py {service} "$QUIRE_EXTRAS"' in (ROOT / "Dockerfile").read_text()
    with pytest.raises(SystemExit, match=r"^QUIRE_EXTRAS names 'trace', which is no extra .*tracing"):
        script("requirements").requirements("scheduler", pyproject, "trace")
    for name, service in compose(QUIRE_EXTRAS="tracing")["services"].items():
        assert name in ONCE or service["build"]["args"]["QUIRE_EXTRAS"] == "tracing", name


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_each_image_is_built_once(profile):
    """Services of one image that each build it build and export it as often as there are of them."""
    services = [each for each in compose()["services"].values() if profile in each.get("profiles", [profile])]
    builders = [each["image"] for each in services if "build" in each]
    assert sorted(builders) == sorted({each["image"] for each in services})
    assert all(each["pull_policy"] == "never" for each in services if "build" not in each)


def test_the_context_holds_what_the_wheel_is_made_of():
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {name.split(".")[1] for name in packages if "." in name}
    taken = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert folders <= taken
    copied = re.findall(r"deploy/\w+\.py", (ROOT / "Dockerfile").read_text())
    assert copied
    assert all((ROOT / name).is_file() for name in copied)


def test_a_gpu_is_claimed_until_its_process_ends(tmp_path):
    claims = script("claim_gpu")
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert claims.devices(tmp_path) == [0, 1]
    code = (
        f"import sys; sys.path.insert(0, {str(DEPLOY)!r}); import claim_gpu, os, pathlib\n"
        f"print(claim_gpu.claim(2, pathlib.Path({str(tmp_path)!r})), flush=True)\n"
        "os.execvp('cat', ['cat'])"  # the lock goes on in what the process becomes
    )

    def start() -> tuple[subprocess.Popen[str], str]:
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )  # fmt: skip
        assert child.stdout is not None
        return child, child.stdout.readline().strip()

    children = []
    try:
        for expected in ("0", "1", "None"):
            child, got = start()
            children.append(child)
            assert got == expected
        children[0].kill()
        children[0].wait()
        child, got = start()
        children.append(child)
        assert got == "0"
    finally:
        for child in children:
            child.kill()
            child.communicate()


@pytest.mark.parametrize(
    ("there", "says"), [([], "sees no NVIDIA GPU"), (["nvidia0"], "all 1 GPUs here are taken")], ids=["none", "taken"]
)
def test_a_worker_without_a_gpu_says_why_in_one_line(there, says, tmp_path, monkeypatch, capsys):
    claims = script("claim_gpu")
    monkeypatch.setattr(claims, "DEVICES", tmp_path)
    monkeypatch.setattr(claims, "CLAIMS", tmp_path)
    for name in ("nvidiactl", "nvidia-uvm", *there):  # the first two come with the driver
        (tmp_path / name).touch()
    monkeypatch.setattr(claims, "claim", lambda count, folder: None)
    with pytest.raises(SystemExit) as ended:
        claims.main(["never-run"])
    said = capsys.readouterr().out
    assert ended.value.code == 78
    if there:
        claims.main(["--check"])  # which looks whether there is any
    else:
        with pytest.raises(SystemExit):
            claims.main(["--check"])
        assert capsys.readouterr().out == said
    assert said.count("\n") == 1 and said.startswith("quire.gpu_worker: error: ") and says in said


# ---------------------------------------------------------------- health


def test_link_reads_the_kernel_s_table(tmp_path):
    health = script("healthcheck")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(health.Unwell, match=str(port)):
            health.link(str(port))
        with socket.create_connection(("127.0.0.1", port)):
            health.link(str(port))


def test_a_check_whose_key_file_is_lacking_says_so_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("QUIRE_KEYS", str(tmp_path / "none"))
    assert script("healthcheck").main(["answers", "1"]) == 1
    assert (
        capsys.readouterr().out
        == f"key file {tmp_path}/none is not a file; make one with `quire keygen {tmp_path}/none`.\n"
    )


def test_a_scheduler_answers_who_has_its_key(tmp_path, monkeypatch):
    health = script("healthcheck")
    monkeypatch.setattr(health, "TIMEOUT_S", 60.0)
    key = tmp_path / "quire.key"
    Keys.generate().save(str(key))
    port = free_port(2)
    command = [sys.executable, "-m", "quire.scheduler", f"--scheduler=tcp://127.0.0.1:{port}", f"--keys={key}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        while "listening" not in process.stderr.readline():
            assert process.poll() is None
        monkeypatch.setenv("QUIRE_KEYS", str(key))
        health.answers(str(port))
        other = tmp_path / "other.key"
        Keys.generate().save(str(other))
        monkeypatch.setenv("QUIRE_KEYS", str(other))
        monkeypatch.setattr(health, "TIMEOUT_S", 0.5)
        with pytest.raises(health.Unwell):
            health.answers(str(port))
    finally:
        process.terminate()
        process.communicate()


def test_a_health_check_leaves_no_line_above_debug(tmp_path):
    """It comes every few seconds, for ever: to the scheduler, to a detokenizer, and to ask for the workers."""
    address, port = f"tcp://127.0.0.1:{free_port(2)}", free_port()
    commands = {
        "scheduler": [f"--scheduler={address}"],
        "detokenizer": [f"--scheduler={address}", f"--bind=tcp://127.0.0.1:{port}"],
    }
    logs = {service: tmp_path / service for service in commands}
    processes = []
    try:
        for service, flags in commands.items():
            with logs[service].open("w") as log:
                command = [sys.executable, "-m", f"quire.{service}", "--log-level=debug", *flags]
                processes.append(subprocess.Popen(command, stderr=log))
        for asked in (address.rpartition(":")[2], str(port)):
            check = [sys.executable, str(DEPLOY / "healthcheck.py"), "answers", asked]
            wait_until(lambda check=check: subprocess.run(check).returncode == 0, "it answers", 120)
        subprocess.run([str(BIN / "quire"), "workers", "list", f"--scheduler={address}"], check=True)
        wait_until(lambda: "health-" in logs["detokenizer"].read_text(), "the detokenizer has seen it go", 60)
        wait_until(
            lambda: re.search(r"operator-\w+ is gone", logs["scheduler"].read_text()), "the operator has left", 60
        )
    finally:
        for process in processes:
            process.terminate()
            process.wait(60)
    for log in logs.values():
        lines = [line for line in log.read_text().splitlines() if "health-" in line or "operator-" in line]
        assert lines or log is logs["scheduler"]
        assert all(re.match(r"[\d-]+ [\d:]+ D ", line) for line in lines), lines


def test_a_check_waits_for_a_process_that_starts_and_not_for_one_that_cannot(tmp_path, monkeypatch, capsys):
    health = script("healthcheck")
    monkeypatch.setattr(health, "PAUSE_S", 0.01)
    monkeypatch.setattr(health, "SERVED", served := tmp_path / "served")
    monkeypatch.setenv("QUIRE_FAILURE", str(failure := tmp_path / "failure"))
    asked = []

    def link(port: str) -> None:
        asked.append(port)
        if len(asked) < 3:
            raise health.Unwell("not yet")

    monkeypatch.setattr(health, "link", link)
    assert health.main(["--starting=600", "link", "1"]) == 0
    assert len(asked) == 3 and served.exists()
    asked.clear()
    assert health.main(["--starting=600", "link", "1"]) == 1  # it served before: that it does not is told at once
    assert len(asked) == 1 and capsys.readouterr().out == "not yet\n"
    served.unlink()
    failure.write_text("quire.frontend: error: no such model")
    assert health.main(["--starting=600", "link", "1"]) == 1
    assert capsys.readouterr().out == "quire.frontend: error: no such model\n"


# ---------------------------------------------------------------- what each process is told


ONCE = {"keys", "gpu_check"}
"""Services of compose that end before the others start."""


def check_flags(service: str, argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The service's own parser takes these flags."""
    try:
        parse_service_args(service, argv)
    except (SystemExit, ConfigError) as error:
        pytest.fail(f"quire.{service} does not take {argv}: {error}")


def compose(*args: str, **env: str) -> dict[str, Any]:
    """compose.yaml without an engine: anchors and merges resolved, and variables as compose would fill them."""
    text = (ROOT / "compose.yaml").read_text()

    def fill(found: re.Match[str]) -> str:
        name, mark, value = found[1], found[2], found[3]
        if mark == ":+":
            return re.sub(r"\$\{(\w+)(:-)([^${}]*)\}", fill, value) if env.get(name) else ""
        return env.get(name) or value

    text = re.sub(r"\$\{(\w+)(:-|:\+)((?:[^${}]|\$\{[^{}]*\})*)\}", fill, text)
    assert "${" not in text
    return yaml.safe_load(text)


def command_of(service: dict[str, Any]) -> list[str]:
    """Flags in a service's command and entrypoint, variables of the container replaced."""
    words = str(service.get("command", "")).split()
    if "--advertise" in str(service.get("entrypoint")):
        words += ["--advertise", "tcp://0a1b2c3d4e5f:5610"]
    return words


@pytest.mark.parametrize("model", ["", "some/model"])
def test_compose_gives_flags_that_services_take(model, monkeypatch):
    services = compose(QUIRE_MODEL=model)["services"]
    assert set(services) == {*ONCE, *SERVICES, "gpu_worker_cuda"}
    for name, service in services.items():
        if name not in ONCE:
            check_flags(name.removesuffix("_cuda"), command_of(service), monkeypatch)
            assert ("--model=some/model" in command_of(service)) == (bool(model) and name != "scheduler")


def test_the_documented_override_names_every_reader_of_the_model_and_its_name_counts():
    text = (ROOT / "docs/deployment.md").read_text()
    (block,) = re.findall(r"```yaml\n(x-model: .*?)```", text, re.DOTALL)
    services = yaml.safe_load(block)["services"]
    assert set(services) == set(SERVICES) - {"scheduler"}
    assert all(each["volumes"] for each in services.values())
    frontend = compose(QUIRE_MODEL="/models/m", QUIRE_FRONTEND_ARGS="--served-model-name m")["services"]["frontend"]
    args = parse_service_args("frontend", command_of(frontend))
    assert args.model == "/models/m" and args.served_model_name == ["m"]
    assert "compose.override.yaml" in (ROOT / ".gitignore").read_text().split()


@pytest.mark.parametrize("page", ["upgrade.md", "deployment.md"])
def test_documented_commands_of_compose_scale_what_they_reach(page):
    """``--no-deps`` alone has the next plain ``up`` replace everything; a service out of reach cannot be scaled."""
    services = compose()["services"]

    def reached(name: str) -> set[str]:
        return {name}.union(*map(reached, services[name].get("depends_on", {})))

    for line in re.findall(r"\$ (docker compose .*up -d.*)", (ROOT / "docs" / page).read_text()):
        words = line.partition("#")[0].split()
        assert "--no-deps" not in words, line
        scaled = {word.partition("=")[0] for word in words if "=" in word}
        if words[-1] in services:
            assert scaled <= reached(words[-1]), line


def test_compose_publishes_http_alone_and_gives_each_service_time_to_drain():
    found = compose()
    for name, service in found["services"].items():
        assert bool(service.get("ports")) == (name == "frontend")
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        if name not in ONCE:
            assert service["init"]
            assert service["restart"] == "unless-stopped"
            assert service["healthcheck"]["test"][:2] == ["CMD", "python"]
            starting = next(word for word in service["healthcheck"]["test"] if word.startswith("--starting="))
            assert "start_period" not in service["healthcheck"]  # within it a failure would not count
            assert int(service["healthcheck"]["timeout"].removesuffix("s")) > int(starting.partition("=")[2]) + 5
    args = parse_service_args("scheduler", [])
    for name, limit in (("frontend", args.shutdown_timeout), ("gpu_worker", args.drain_timeout)):
        assert int(found["services"][name]["stop_grace_period"].removesuffix("s")) >= limit + 10
    assert found["services"]["gpu_worker"]["profiles"] == ["cpu"]
    assert found["services"]["gpu_worker_cuda"]["profiles"] == ["gpu"]
    assert (ROOT / ".env").read_text().split() == ["COMPOSE_PROFILES=cpu"]


def test_without_a_gpu_the_profile_of_gpus_starts_nothing():
    services = compose()["services"]
    check, workers = services["gpu_check"], services["gpu_worker_cuda"]
    assert check["profiles"] == workers["profiles"] == ["gpu"] and check["deploy"] == workers["deploy"]
    assert check["entrypoint"] == ["python", "/opt/claim_gpu.py", "--check"] and "depends_on" not in check
    done = "service_completed_successfully"
    assert workers["depends_on"]["gpu_check"] == {"condition": done}
    assert services["keys"]["depends_on"] == {"gpu_check": {"condition": done, "required": False}}
    for name in set(services) - ONCE:
        assert services[name]["depends_on"]["keys"] == {"condition": done}


def test_what_cannot_work_does_not_loop_where_exit_codes_mean_nothing(tmp_path):
    """Compose restarts whatever ends; so what ends by its configuration says why, and waits before it ends."""
    for name, service in compose()["services"].items():
        assert service["restart"] == ("no" if name in ONCE else "unless-stopped")
        assert ({"QUIRE_RETRY_AFTER", "QUIRE_FAILURE"} <= set(service.get("environment", {}))) == (name not in ONCE)
    minute = compose()["services"]["frontend"]["environment"]["QUIRE_RETRY_AFTER"]
    environment = {**os.environ, "QUIRE_RETRY_AFTER": minute, "QUIRE_FAILURE": str(tmp_path / "failure")}
    command = [sys.executable, "-m", "quire.frontend", "--scheduler=ipc:///nowhere", "--model=/no/such/model"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("quire.frontend: error: ")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        assert (tmp_path / "failure").read_text().startswith("quire.frontend: error: model folder '/no/such/model'")
        process.terminate()
        assert process.wait(30) == -signal.SIGTERM  # at once, or else this would be the code 78 of a minute later
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.communicate()
    ends = subprocess.run(command, env=environment | {"QUIRE_RETRY_AFTER": "1"}, capture_output=True, text=True)
    assert (ends.returncode, ends.stderr.count("\n")) == (78, 1)


# ---------------------------------------------------------------- Kubernetes


def manifests() -> list[tuple[str, dict[str, Any]]]:
    """Every document of deploy/k8s that a cluster takes, with its file's name."""
    found = []
    for path in sorted((DEPLOY / "k8s").glob("*.yaml")):
        if path.name not in ("kustomization.yaml", "adapter-values.yaml"):
            found += [(path.name, document) for document in yaml.safe_load_all(path.read_text()) if document]
    return found


def pods() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Service, workload and pod of each workload."""
    kinds = ("Deployment", "StatefulSet")
    found = [document for _, document in manifests() if document["kind"] in kinds]
    return [(d["metadata"]["name"].replace("-", "_"), d, d["spec"]["template"]["spec"]) for d in found]


@pytest.mark.parametrize("version", ["1.30", "1.33"])
def test_manifests_have_the_shape_that_kubernetes_takes(version):
    checker = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for _, document in manifests():
        checker.validate(document, version, strict=True)


def test_kustomization_lists_every_manifest():
    listed = yaml.safe_load((DEPLOY / "k8s/kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == sorted({name for name, _ in manifests()})


def test_pods_are_told_what_their_services_take(monkeypatch):
    assert sorted(name for name, _, _ in pods()) == sorted(SERVICES)
    for name, _, pod in pods():
        container = pod["containers"][0]
        names = {entry["name"] for entry in container.get("env", [])}
        used = set(re.findall(r"\$\((\w+)\)", " ".join(container["args"])))
        assert used <= names
        check_flags(name, [re.sub(r"\$\(\w+\)", "x", word) for word in container["args"]], monkeypatch)
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"]
        assert not security["allowPrivilegeEscalation"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] == 10001
        assert container["readinessProbe"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert mounted <= volumes | {"cache"}


def test_selectors_find_their_pods():
    labels = {name: d["spec"]["template"]["metadata"]["labels"] for name, d, _ in pods()}
    for _, document in manifests():
        spec = document.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector") or {}
        wanted = selector.get("matchLabels", selector) if document["kind"] != "HorizontalPodAutoscaler" else {}
        if wanted:
            assert any(wanted.items() <= have.items() for have in labels.values()), document["metadata"]["name"]
    names = {document["metadata"]["name"]: document for _, document in manifests()}
    for document in names.values():
        if document["kind"] == "HorizontalPodAutoscaler":
            assert document["spec"]["scaleTargetRef"]["name"] in names


def test_pods_have_time_to_drain():
    args = parse_service_args("scheduler", [])
    grace = {name: pod["terminationGracePeriodSeconds"] for name, _, pod in pods()}
    assert grace["frontend"] >= args.shutdown_timeout + 15  # preStop, and the notice that /health/ready gives
    assert grace["gpu_worker"] >= args.drain_timeout + 10


# ---------------------------------------------------------------- systemd


def units() -> dict[str, dict[str, list[str]]]:
    """Each unit's settings; a name may have several values."""
    found = {}
    for path in sorted((DEPLOY / "systemd").glob("*.service")):
        settings: dict[str, list[str]] = {}
        for line in path.read_text().replace("\\\n", " ").splitlines():
            if "=" in line and not line.startswith("#"):
                name, _, value = line.partition("=")
                settings.setdefault(name, []).append(value)
        found[path.name] = settings
    return found


def test_units_start_what_services_take_and_wait_for_drains(monkeypatch):
    found = units()
    args = parse_service_args("scheduler", [])
    for service in SERVICES:
        name = next(n for n in found if re.fullmatch(rf"quire-{service.replace('_', '-')}@?\.service", n))
        (start,) = found[name]["ExecStart"]
        words = [word for word in start.split() if not word.startswith("$")]
        words = [word.replace("%i", "0") for word in words]
        assert words[1:4] == ["-P", "-m", f"quire.{service}"]
        check_flags(service, words[4:], monkeypatch)
        assert found[name]["Restart"] == ["always"]
        assert found[name]["RestartPreventExitStatus"] == ["78"]
        limit = {"frontend": args.shutdown_timeout, "gpu_worker": args.drain_timeout}.get(service, 0)
        assert int(found[name]["TimeoutStopSec"][0]) >= limit + 10
    frontend = found["quire-frontend@.service"]
    folder = dict(word.split("=", 1) for word in " ".join(frontend["Environment"]).split())[FIGURES]
    assert Path(folder).parent == Path("/run", *frontend["RuntimeDirectory"])


def test_what_a_worker_keeps_for_its_next_start_lies_on_its_volume():
    """Its model, its compiled kernels and its measurements, wherever the home of its user is."""
    (image,) = re.findall(r"^ENV (HF_HOME=.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    unit = " ".join(units()["quire-gpu-worker@.service"]["Environment"])
    for folder, words in (("/cache", image), ("/var/cache/quire", unit)):
        kept = dict(word.split("=", 1) for word in words.split())
        for name in ("HF_HOME", "TRITON_CACHE_DIR", "XDG_CACHE_HOME"):
            assert Path(kept[name]).is_relative_to(folder), name


@pytest.mark.skipif(not os.path.exists("/usr/bin/systemd-analyze"), reason="no systemd-analyze here")
def test_systemd_accepts_the_units(tmp_path):
    for path in [*(DEPLOY / "systemd").glob("*.service"), DEPLOY / "systemd/quire.target"]:
        text = re.sub(r"^(ExecStart=)\S+", rf"\1{sys.executable}", path.read_text(), flags=re.MULTILINE)
        (tmp_path / path.name).write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", *(str(p) for p in sorted(tmp_path.iterdir()))]
    done = subprocess.run(command, capture_output=True, text=True)
    ours = [line for line in done.stderr.splitlines() if "quire" in line]
    assert not ours
