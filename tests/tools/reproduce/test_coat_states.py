"""The table of COAT's ranges and errors: of moments made by hand, and of a checkpoint that a tiny run wrote."""

import csv

import pytest
import torch

from helpers import checkpoints, tiny
from megatron.lm.checkpoint import latest
from msamp.numerics.formats import E4M3, E5M2
from tools.reproduce import coat_states

EPS = 1e-8


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints of an O0 and of an O2 run."""
    root = tmp_path_factory.mktemp("coat")
    prefix = tiny.write_data(root)
    return {level: checkpoints.saved(prefix, root / level, opt_level=level) for level in ("O0", "O2")}


def read(path):
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_ranges_by_hand():
    m = torch.zeros(1, 384)
    m[0, :128] = torch.linspace(-4.0, -2.0, 128)
    m[0, 128:256] = 10.0 ** torch.linspace(-2, 2, 128)
    row = coat_states.range_row([(m, m.square())], "m")
    assert (row["what"], row["range_p10"], row["range_p90"], row["page_range"]) == ("range of m", "2", "2", "1000")
    assert coat_states.range_row([(m, m.square())] * 2, "v")["range_p90"] == "1e+08"
    steps = torch.tensor([2.0, 3.0, 5.0, 7.0, 11.0]).repeat_interleave(128).view(5, 128)
    steps[:, 0] = 1.0
    row = coat_states.range_row([(steps, steps.square())], "m")
    assert (row["range_p10"], row["range_median"], row["range_p90"]) == ("2", "5", "7")


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)])
def test_moments_that_fit_have_no_error(formats, expand):
    """Two magnitudes in a group that are the ends of the range: largest and smallest code whether expanded or not."""
    pair = [torch.where(torch.arange(256) % 2 == 0, fmt.max, fmt.smallest) for fmt in formats]
    row = coat_states.error_row([(pair[0], pair[1]), (pair[0].view(2, 128), pair[1].view(2, 128))], formats, expand, EPS)
    assert (row["m"], row["v"], row["expand"]) == (str(formats[0]), str(formats[1]), "yes" if expand else "no")
    assert float(row["sqnr_db"]) > 110
    assert float(row["group_error"]) < 1e-6
    assert (row["underflow_m"], row["underflow_v"]) == ("0", "0")


def test_a_v_that_vanishes_leaves_the_update_to_eps_and_expansion_keeps_it():
    m, v = torch.full((128,), 1e-3), torch.full((128,), 1e-6)
    v[5] = 1e-14
    plain, expanded = (coat_states.error_row([(m, v)], (E4M3, E4M3), expand, EPS) for expand in (False, True))
    assert float(plain["underflow_v"]) == pytest.approx(1 / 128, rel=1e-3)
    assert float(plain["mse"]) == pytest.approx((1e-3 / 1e-8 - 1e-3 / (1e-7 + 1e-8)) ** 2 / 128, rel=1e-3)
    assert float(expanded["underflow_v"]) == 0
    assert float(expanded["sqnr_db"]) > 40


def test_expansion_helps_as_the_page_says():
    """Ranges of about 1e3 and 1e1: E4M3 better for m, for v as good as E5M2 once expanded."""
    generator = torch.Generator().manual_seed(2)

    def draw(decades):
        return 10 ** (decades * torch.rand(128 * 64, generator=generator))

    pairs = [(draw(3), draw(1))]
    sqnr = {
        (m.name[-4:], v.name[-4:], expand): float(coat_states.error_row(pairs, (m, v), expand, EPS)["sqnr_db"])
        for m in (E4M3, E5M2)
        for v in (E4M3, E5M2)
        for expand in (False, True)
    }
    assert all(sqnr[m, v, True] > sqnr[m, v, False] + 4 for m, v, _ in sqnr)
    assert sqnr["e4m3", "e4m3", True] > sqnr["e5m2", "e4m3", True]
    assert sqnr["e4m3", "e4m3", False] > sqnr["e4m3", "e5m2", False] + 1
    assert abs(sqnr["e4m3", "e4m3", True] - sqnr["e4m3", "e5m2", True]) < 1.5


def test_a_checkpoint_gives_the_whole_table(folders, tmp_path, capsys):
    path = tmp_path / "new" / "coat.csv"
    assert coat_states.main(["--load", str(folders["O0"]), "--csv", str(path)]) == 0
    printed = capsys.readouterr().out
    found = read(path)
    assert tuple(found[0]) == ("model", "iteration", *coat_states.COLUMNS, "date", "commit", "gpu", "driver", "torch")
    assert {(row["model"], row["iteration"]) for row in found} == {("2x32", "4")}
    assert [row["weights"] for row in found] == [kind for kind in ("linear", "embedding", "vector", "all") for _ in range(2 + 8)]
    elements = {row["weights"]: int(row["elements"]) for row in found}
    assert elements["all"] == elements["linear"] + elements["embedding"] + elements["vector"]
    assert elements["linear"] == 2 * 12 * 32 * 32
    stored = checkpoints.tensors(latest(folders["O0"]))
    assert elements["all"] == sum(x.numel() for key, x in stored.items() if key.startswith("exp_avg/"))
    assert all(name in printed for name in coat_states.COLUMNS)
    better = [float(row["group_error"]) for row in found if row["weights"] == "linear" and row["expand"]]
    assert all(with_ < without for without, with_ in zip(better[:4], better[4:], strict=True))


def test_moments_that_are_rounded_already_and_no_moments_are_refused(folders, tmp_path, capsys):
    assert coat_states.main(["--load", str(folders["O2"])]) == 2
    assert "already rounded: give a run at O0 or O1" in capsys.readouterr().err
    folder = latest(folders["O0"])
    checkpoints.rewrite(folder, {}, without=[key for key in checkpoints.tensors(folder) if key.startswith("exp_avg")])
    assert coat_states.main(["--load", str(folder)]) == 2
    assert "contains no moments" in capsys.readouterr().err
    assert coat_states.main(["--load", str(tmp_path / "none")]) == 2


def test_the_kept_table_has_these_columns():
    found = read(coat_states.rows.ROOT / "tools/reproduce/results/coat_states.csv")
    assert tuple(found[0])[2 : 2 + len(coat_states.COLUMNS)] == coat_states.COLUMNS
    errors = {(r["m"], r["v"], r["expand"]): float(r["group_error"]) for r in found if r["weights"] == "all" and r["m"]}
    assert all(errors[m, v, "yes"] < errors[m, v, "no"] for m, v, _ in errors)  # what the page says of them
