# SPDX-License-Identifier: Apache-2.0
"""The map of the house: every op has its room in every tree, and the walls hold."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
ROOMS = sorted(p.parent.name for p in (ROOT / "fused_ops").glob("*/op.py"))
KERNEL_SUFFIXES = {".cu", ".cuh"}
SOURCES = sorted(
    p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".h", ".cpp", *KERNEL_SUFFIXES}
)


def includes(path):
    return re.findall(r'^\s*#include\s+[<"]([^>"]+)[>"]', path.read_text(), flags=re.MULTILINE)


def relative(path):
    return path.relative_to(ROOT / "csrc")


def test_there_are_rooms():
    assert len(ROOMS) >= 4
    assert len(SOURCES) > 10


@pytest.mark.parametrize("room", ROOMS)
def test_room_is_complete(room):
    for name in ("__init__", "op", "module", "reference", "composition"):
        assert (ROOT / "fused_ops" / room / f"{name}.py").is_file(), name
    for name in ("plan.h", "plan.cpp"):
        assert (ROOT / "csrc" / room / name).is_file(), name
    assert (ROOT / "tests" / f"test_{room}.py").is_file()
    assert (ROOT / "benchmarks" / f"{room}.py").is_file()
    assert (ROOT / "docs" / "ops" / f"{room}.md").is_file()


@pytest.mark.parametrize("room", ROOMS)
def test_room_with_kernels_has_its_host_op_and_tiles(room):
    folder = ROOT / "csrc" / room
    if any(folder.glob("*.cu")):
        for name in (f"{room}.h", f"{room}_cuda.cpp", "config.h"):
            assert (folder / name).is_file(), name


def test_every_csrc_folder_is_a_room_or_the_corridor():
    folders = {p.name for p in (ROOT / "csrc").iterdir() if p.is_dir()}
    assert folders == {*ROOMS, "common"}


def test_only_stable_h_includes_torch():
    for path in SOURCES:
        if any(name.startswith(("torch/", "ATen/", "c10/")) for name in includes(path)):
            assert relative(path) == pathlib.Path("common/stable.h"), path


def test_kernels_do_not_see_torch():
    for path in SOURCES:
        if path.suffix in KERNEL_SUFFIXES:
            assert not any("stable.h" in name for name in includes(path)), path


def test_rooms_do_not_include_each_other():
    for path in SOURCES:
        owner = relative(path).parts[0]
        for name in includes(path):
            target = name.split("/")[0]
            if target in ROOMS:
                assert owner == target, f"{path} includes {name}"


def test_sm90a_code_is_included_by_sm90a_files_only():
    for path in SOURCES:
        inside = "sm90a" in path.name or "sm90a" in relative(path).parts
        assert inside or not any("sm90a" in name for name in includes(path)), path


def test_ptx_lives_in_the_arch_folders_of_the_corridor():
    for path in SOURCES:
        if re.search(r"\basm\b", path.read_text()):
            assert relative(path).parts[:2] == ("common", "cuda"), path


def test_python_rooms_do_not_import_each_other():
    for room in ROOMS:
        for path in (ROOT / "fused_ops" / room).glob("*.py"):
            for other in ROOMS:
                if other != room:
                    assert f"fused_ops.{other}" not in path.read_text(), f"{path}: {other}"


def test_files_read_in_one_sitting():
    for folder in ("csrc", "fused_ops", "tests", "benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".h", ".cpp", *KERNEL_SUFFIXES}:
                assert len(path.read_text().splitlines()) <= 900, path


def test_every_source_names_its_licence():
    for folder in ("csrc", "fused_ops", "tests", "benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".h", ".cpp", *KERNEL_SUFFIXES} and path.stat().st_size:
                assert "SPDX-License-Identifier: Apache-2.0" in path.read_text()[:200], path
