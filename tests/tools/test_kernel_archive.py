"""`dsv4 kernels`: a cache of Triton's in a file and out of it again; files that are damaged, foreign or hostile."""

import io
import json
import tarfile

import pytest

from dsv4.tools import kernel_archive
from dsv4.tools.kernel_archive import KernelArchiveError, pack, unpack

pytest.importorskip("triton")
NAMES = ["A" * 52, "B2" * 26]
HERE = {"triton": "3.6.0", "build": "this"}


@pytest.fixture
def cache(tmp_path):
    """As Triton leaves it: sources, binaries, groups; and a kernel of which there is no binary."""
    folder = tmp_path / "cache"
    for idx, name in enumerate(NAMES):
        (folder / name).mkdir(parents=True)
        for suffix in ("ttir", "ptx", "cubin"):
            (folder / name / f"_norm_kernel.{suffix}").write_bytes(bytes([idx]) * 100)
        (folder / name / "_norm_kernel.json").write_text(json.dumps({"target": {"backend": "cuda", "arch": 90}}))
        (folder / name / "__grp___norm_kernel.json").write_text("{}")
    (folder / ("C" * 52)).mkdir()
    (folder / ("C" * 52) / "launcher.so").write_bytes(b"x")
    return folder


@pytest.fixture
def file(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_archive, "_here", lambda: HERE)
    assert pack(cache, tmp_path / "k.tar.xz").num_kernels == 2
    return tmp_path / "k.tar.xz"


def rewritten(file, change):
    """The archive with its members as `change` leaves them."""
    with tarfile.open(file) as archive:
        members = {entry.name: archive.extractfile(entry).read() for entry in archive}
    change(members)
    with tarfile.open(file, "w:xz") as archive:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


def test_there_and_back(cache, file, tmp_path):
    target = tmp_path / "target"
    assert unpack(file, target).num_kernels == 2
    assert sorted(path.name for path in target.iterdir()) == sorted(NAMES)
    for name in NAMES:
        found = target / name
        assert (found / "_norm_kernel.cubin").read_bytes() == (cache / name / "_norm_kernel.cubin").read_bytes()
        group = json.loads((found / "__grp___norm_kernel.json").read_text())
        assert group == {"child_paths": {
            one: str(found / one) for one in ("_norm_kernel.cubin", "_norm_kernel.json")
        }}  # fmt: skip
        assert not (found / "_norm_kernel.ptx").exists(), "what they were made from stays behind"
    assert unpack(file, target).num_kernels == 2, "twice does no harm"


@pytest.mark.parametrize(
    ("here", "message"),
    [
        ({"triton": "3.7.0", "build": "this"}, "packed with Triton 3.6.0, and this is 3.7.0"),
        ({"triton": "3.6.0", "build": "other"}, "another build of Triton 3.6.0"),
    ],
)
def test_another_triton(file, tmp_path, monkeypatch, here, message):
    monkeypatch.setattr(kernel_archive, "_here", lambda: here)
    with pytest.raises(KernelArchiveError, match=message):
        unpack(file, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_another_dsv4_is_worth_a_word(file, tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_archive, "__version__", "9.9.9")
    assert "this is 9.9.9: kernels that differ are compiled again" in unpack(file, tmp_path / "target").note


def cut(file):
    file.write_bytes(file.read_bytes()[:-200])


def changed(file):
    def change(members):
        members[f"{NAMES[0]}/_norm_kernel.cubin"] = b"\1" * 100

    rewritten(file, change)


def missing(file):
    rewritten(file, lambda members: members.pop(f"{NAMES[0]}/_norm_kernel.cubin"))


def outside(file):
    rewritten(file, lambda members: members.update({"../../evil.cubin": b"x"}))


def unknown(file):
    rewritten(file, lambda members: members.update({f"{NAMES[0]}/more.json": b"{}"}))


def foreign(file):
    rewritten(file, lambda members: members.pop("manifest.json"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "is damaged"), (changed, "_norm_kernel.cubin is damaged"), (missing, "is not whole"),
        (outside, "'../../evil.cubin' does not belong there"), (unknown, "more.json' does not belong"),
        (foreign, "is no file of this version"),
    ],
)  # fmt: skip
def test_nothing_is_taken_from_a_damaged_file(file, tmp_path, damage, message):
    damage(file)
    with pytest.raises(KernelArchiveError, match=message):
        unpack(file, tmp_path / "target")
    assert not (tmp_path / "target").exists()
    assert not (tmp_path / "evil.cubin").exists()


def test_no_kernels(tmp_path):
    with pytest.raises(KernelArchiveError, match="holds no compiled kernel"):
        pack(tmp_path, tmp_path / "k.tar.xz")
    with pytest.raises(KernelArchiveError, match="is no folder"):
        pack(tmp_path / "nothing", tmp_path / "k.tar.xz")
    assert not list(tmp_path.glob("*k.tar*"))
