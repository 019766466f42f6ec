"""The package as a whole: what the wheel holds, who imports what, and what must not be in the code."""

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["proto", "scheduler", "gpu_worker", "detokenizer", "frontend", "client", "cli"]
SOURCES = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))


def imported(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_source_keeps_the_rules(path):
    tree = ast.parse(path.read_text("utf-8"))
    names = imported(tree)
    assert not names & {"pickle", "cloudpickle", "dill", "marshal", "multiprocessing"}
    if "gpu_worker" not in path.parts:
        assert not names & {"torch", "triton"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):  # vanishes under -O: it may tell the type checker something, no more
            assert ast.unparse(node.test).endswith(" is not None"), f"line {node.lineno}"
        if isinstance(node, ast.Name):
            assert node.id != "__debug__", f"line {node.lineno}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec"), f"line {node.lineno}"
        if isinstance(node, ast.Attribute):
            assert node.attr not in ("send_pyobj", "recv_pyobj"), f"line {node.lineno}"
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"line {node.lineno}: bare except"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    # Built from a copy, so that the checkout stays as it is.
    source = out / "source"
    subprocess.run(["git", "-C", str(ROOT), "checkout-index", "-a", f"--prefix={source}/"], check=True)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out), str(source)]
    done = subprocess.run(pip, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl"))


@pytest.mark.slow
@pytest.mark.timeout(0)  # a compiler makes the kernels, which takes as long as the machine is busy
def test_the_wheel_holds_every_module_and_the_demo_model(wheel, tmp_path):
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in SOURCES:
        assert f"quire/{path.relative_to(ROOT)}" in names
    assert "quire/demo_model/config.json" in names
    assert "quire/demo_model/model.safetensors" in names
    assert not [n for n in names if n.startswith(("quire/tests", "quire/bench", "tests", "proto"))]


@pytest.mark.slow
def test_services_load_only_what_they_use():
    heavy = {
        "torch",
        "triton",
        "transformers",
        "tokenizers",
        "aiohttp",
        "jinja2",
        "numpy",
        "uvloop",
        "prometheus_client",
        "opentelemetry",
        "asyncio",
        "zmq",
    }
    allowed = {
        "quire": set(),
        "quire.scheduler.loop": {"numpy", "zmq"},
        "quire.detokenizer.core": {"tokenizers"},
        "quire.detokenizer.loop": {"tokenizers", "jinja2", "asyncio", "zmq"},
        "quire.frontend.app": {"aiohttp", "uvloop", "prometheus_client", "asyncio", "zmq"},
        "quire.client.core": set(),
        "quire.client.engine": {"asyncio", "zmq"},
        "quire.client.supervisor.launch": set(),
        "quire.cli.main": set(),
        "quire.gpu_worker.main": {"zmq"},
        "quire.gpu_worker.runner": {"torch", "numpy", "asyncio", "zmq"},
    }
    for module, may in allowed.items():
        code = f"import sys, {module}; print(*sorted({heavy!r} & set(sys.modules)))"
        done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert set(done.stdout.split()) <= may, module


def test_a_checkout_may_lie_in_a_folder_of_any_name(tmp_path):
    """The root is a package to pytest too, and no module can be called ``quire-main``, as an archive unpacks."""
    (tests := tmp_path / "quire-main" / "tests").mkdir(parents=True)
    for name in ("__init__.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tests.parent)
    (tests / "test_nothing.py").write_text("def test_nothing(): pass\n")
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tests.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
