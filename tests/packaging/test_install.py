"""The package as users install it: from a wheel, from an sdist, and editable, from a copy of the committed files.

About 40 s, most of it pip's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LINKED = ("configs", "models", "nki_kernels", "pallas_kernels", "sharding")
WITHOUT_PATH = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

# Prints where the package and one module of each linked folder lie, and whether the data files can be read.
PROBE = """
import importlib, json
from importlib.resources import files
import inferlib
from inferlib import configs
names = ["inferlib", "inferlib.configs", "inferlib.models.decoder", "inferlib.nki_kernels.cases",
         "inferlib.pallas_kernels.decode_attention_tpu", "inferlib.sharding.mesh"]
package = files("inferlib")
print(json.dumps({
    "files": {name: importlib.import_module(name).__file__ for name in names},
    "typed": (package / "py.typed").is_file(),
    "layers": configs.load("llama3-8b")["num_hidden_layers"],
    "plans": sum(file.name.endswith(".yaml") for file in (package / "configs" / "plans").iterdir()),
    "tuned": sorted(file.name for file in (package / "pallas_kernels" / "tuned").iterdir()
                    if json.loads(file.read_text())),
}))
"""


def run(*command: str | Path, folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, env=WITHOUT_PATH, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def committed(folder: str = ".", suffix: str = "") -> list[str]:
    """Files and links under git in a folder of the repository that are still here."""
    listed = run("git", "ls-files", "-z", folder, folder=ROOT).split("\0")
    return [name for name in listed if name.endswith(suffix) and name and os.path.lexists(ROOT / name)]


def copy_repository(folder: Path) -> Path:
    """The committed files, with links as links: builds leave files behind, and must not see those of earlier ones."""
    for name in committed():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    return folder


@dataclass(frozen=True)
class Environment:
    """A virtual environment with inferlib and, from outside, what it needs. source: the copy it was installed from."""

    folder: Path
    source: Path

    @property
    def scripts(self) -> Path:
        return self.folder / ("Scripts" if os.name == "nt" else "bin")

    def probe(self, folder: Path) -> dict:
        """What PROBE prints when it runs in a folder, which `python -c` puts first in the path."""
        return json.loads(run(self.scripts / "python", "-c", PROBE, folder=folder).splitlines()[-1])


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    return copy_repository(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Callable[[str], Path]:
    """`built("wheel")` or `built("sdist")`: the file, by the build backend alone."""
    made: dict[str, Path] = {}

    def build(kind: str) -> Path:
        if kind not in made:
            source, out = copy_repository(tmp_path_factory.mktemp("build")), tmp_path_factory.mktemp(kind)
            code = f"import sys, setuptools.build_meta as backend; backend.build_{kind}(sys.argv[1])"
            run(sys.executable, "-P", "-c", code, out, folder=source)
            (made[kind],) = out.iterdir()
        return made[kind]

    return build


# The suite itself runs where the package is installed editable.
FURTHER = [pytest.param(kind, marks=pytest.mark.release) for kind in ("sdist", "editable")]


@pytest.fixture(scope="session", params=["wheel", *FURTHER])
def environment(request, tmp_path_factory, source, built) -> Environment:
    folder = tmp_path_factory.mktemp(request.param)
    venv.create(folder, symlinks=os.name != "nt")
    made = Environment(folder, source)
    variables = {"base": str(folder), "platbase": str(folder)}
    # A folder that a .pth file names is searched, but its own .pth files are not read: the dependencies of this
    # environment are seen, an editable inferlib in it is not.
    outer = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    site = Path(sysconfig.get_path("purelib", "venv", variables))
    (site / "dependencies.pth").write_text("\n".join(sorted(outer)))
    what = ["-e", source] if request.param == "editable" else [built(request.param)]
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--ignore-installed", "--no-index"]
    python = made.scripts / "python"
    run(
        sys.executable, "-m", "pip", "--python", python, "install", *options, *what, folder=tmp_path_factory.mktemp("x")
    )
    return made


def modules(names: list[str]) -> set[str]:
    return {name for name in names if name.endswith(".py")}


def expected_modules() -> set[str]:
    """Each module by its path in the package: those of the linked folders stand below inferlib/ too."""
    linked = {f"inferlib/{name}" for folder in LINKED for name in committed(folder, ".py")}
    return linked | set(committed("inferlib", ".py"))


def test_five_relative_links_make_one_package(source):
    links = {name: os.readlink(source / name) for name in committed("inferlib") if (source / name).is_symlink()}
    assert links == {f"inferlib/{name}": f"../{name}" for name in LINKED}


def test_the_wheel_holds_every_module_and_nothing_else_at_the_top(built):
    names = zipfile.ZipFile(built("wheel")).namelist()
    assert {PurePosixPath(name).parts[0] for name in names if ".dist-info/" not in name} == {"inferlib"}
    assert modules(names) == expected_modules()


def test_the_sdist_holds_every_module(built):
    """The contents of the links, so that it can be unpacked where there are no links."""
    with tarfile.open(built("sdist")) as archive:
        members = [member for member in archive.getmembers() if not member.isdir()]
    assert not [member.name for member in members if member.issym()]
    names = [member.name.partition("/")[2] for member in members]
    assert modules(names) - {"setup.py"} >= expected_modules()


def test_it_is_imported_with_its_data_from_anywhere(environment, source, tmp_path, request):
    """In the repository's root `inferlib/` there comes first, which is the same package thanks to the links."""
    editable = request.node.callspec.params["environment"] == "editable"
    installed = source if editable else environment.folder
    for folder, home in ((tmp_path, installed), (source, source)):
        shown = environment.probe(folder)
        assert all(Path(file).is_relative_to(home) for file in shown.pop("files").values())
        assert shown.pop("plans") == len(committed("configs/plans", ".yaml"))
        assert shown == {"typed": True, "layers": 32, "tuned": ["v5e.json", "v6e.json", "v7x.json"]}


def test_the_command_runs_in_the_root(environment, source):
    help_text = run(environment.scripts / "inferlib", "--help", folder=source)
    assert all(command in help_text for command in ("generate", "compile", "plan"))
    target = json.loads(run(environment.scripts / "inferlib", "targets", "v5e-8", "--json", folder=source))
    assert target["devices"] == 8
