"""The GPUs that a training command may use."""

from __future__ import annotations

from pathlib import Path

from holdfast.daemon.peer.trainer.accelerators import (
    FILE_VARIABLE,
    VISIBLE_VARIABLE,
    Gpu,
    Gpus,
    GpuWatch,
    look,
)


def test_a_file_plays_the_part_of_nvml(tmp_path: Path) -> None:
    path = tmp_path / "gpus"
    path.write_text("0\n1 it has fallen off the bus\n\n  2  \n")
    gpus = look({FILE_VARIABLE: str(path)})
    assert gpus.healthy == ("0", "2")
    assert (str(gpus), gpus.faults()) == ("2 of 3 GPUs", "GPU 1: it has fallen off the bus")
    assert look({FILE_VARIABLE: str(tmp_path / "none")}) == Gpus()


def test_only_visible_gpus_count(tmp_path: Path) -> None:
    path = tmp_path / "gpus"
    path.write_text("0\n1\n2\n3 ECC errors\n")
    visible = {FILE_VARIABLE: str(path), VISIBLE_VARIABLE: "1, 3"}
    assert look(visible).all == (Gpu("1"), Gpu("3", "ECC errors"))


def test_a_gpu_that_is_gone_has_failed() -> None:
    seen = Gpus((Gpu("0"), Gpu("1"), Gpu("2")))
    now = Gpus((Gpu("0"), Gpu("2"))).among(seen)
    assert (now.healthy, len(now.all)) == (("0", "2"), 3)
    assert now.among(now) == now
    assert seen.among(now) == seen, "it is back"


def test_the_number_is_filled_in() -> None:
    watch = GpuWatch(1, lambda _text: None)
    watch._gpus = Gpus((Gpu("0"), Gpu("1", "lost"), Gpu("2")))
    command = ["torchrun", "--nproc-per-node", "{gpus}", "train.py", "--name=x{gpus}"]
    told = ["torchrun", "--nproc-per-node", "2", "train.py", "--name=x2"]
    assert watch.filled(command) == told
