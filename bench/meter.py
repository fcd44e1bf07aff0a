"""Measures what the energy meter costs: the same generations with and without it, plain and drafting.

If nothing counts energy, as in a virtual machine, the meter reads made-up counters of the same form in a
folder (--fake, best on a tmpfs); a plain file costs a little less than the processor's register. Noise blurs
the ratio, so the time that the marks themselves took is printed too.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from edgespec import EnergyMeter, Engine, SamplingParams
from edgespec.apps.energy.meter import Window
from edgespec.decoding.choices import DrafterName
from edgespec.platform.metering import Phase
from script import Measuring, parser, spread, start

PROMPT = "Write a quicksort in Python."
GOAL = 0.005
"""Issue 5: below this share of a run."""
VARIANTS: tuple[DrafterName, ...] = ("none", "auto")


class TimedMeter(EnergyMeter):
    """Adds up the time that marks take, as seen by the caller."""

    marks_s = 0.0
    n_marks = 0

    def mark(self, window: Window, phase: Phase) -> None:
        """Mark, and count the time."""
        began = time.perf_counter()
        super().mark(window, phase)
        self.marks_s += time.perf_counter() - began
        self.n_marks += 1


def fake_tree(root: Path) -> Path:
    """Write one package with memory, as Linux shows them; return the root."""
    for zone, name in (("intel-rapl:0", "package-0"), ("intel-rapl:0:0", "dram")):
        folder = root / "sys/class/powercap" / zone
        folder.mkdir(parents=True)
        (folder / "name").write_text(f"{name}\n")
        (folder / "energy_uj").write_text("1000\n")
        (folder / "max_energy_range_uj").write_text("262143328850\n")
    return root


def main() -> None:
    parse = parser(__doc__, pair=False)
    parse.add_argument("--fake", type=Path, metavar="DIR", help="make counters below a new folder in DIR")
    parse.add_argument("-n", "--n-predict", type=int, default=128)
    parse.add_argument("--rounds", type=int, default=12)
    args = parse.parse_args()

    with tempfile.TemporaryDirectory(dir=args.fake) as folder:
        root = fake_tree(Path(folder)) if args.fake else Path("/")
        with TimedMeter.choose(root) as meter:
            if not meter.available:
                raise SystemExit(f"{meter.reason}; give --fake /dev/shm")
            measure(meter, args)


def measure(meter: TimedMeter, args: argparse.Namespace) -> None:
    measuring = Measuring(args)
    seconds: dict[DrafterName, dict[str, list[float]]] = {
        variant: {"with": [], "without": []} for variant in VARIANTS
    }
    marks: dict[str, tuple[float, int]] = {}
    with Engine(n_threads=args.threads) as engine:
        for variant in VARIANTS:
            for round_ in range(args.rounds + 1):
                if round_ == 1:  # the first one warmed up
                    meter.marks_s, meter.n_marks = 0.0, 0
                for name in sorted(seconds[variant], reverse=bool(round_ % 2)):
                    engine.meter = meter if name == "with" else None
                    engine.forget()
                    params = SamplingParams(temperature=0)
                    result = engine.generate(PROMPT, params=params, n_predict=args.n_predict, drafter=variant)
                    if round_:
                        seconds[variant][name].append(result.stats.total_s)
            marks[variant] = meter.marks_s, meter.n_marks
    measuring.end()
    print(f"{measuring}; {meter.source}; {args.rounds} rounds, {args.n_predict} tokens")
    for variant in VARIANTS:
        times = seconds[variant]
        median, low, high = spread([a / b - 1 for a, b in zip(times["with"], times["without"], strict=True)])
        marks_s, n_marks = marks[variant]
        share = marks_s / sum(times["with"])
        print(
            f"{variant:<5} {n_marks} marks of {1e6 * marks_s / n_marks:.1f} us: {share:.2%} of the time   "
            f"{'met' if share < GOAL else 'MISSED'}: below {GOAL:.1%}; "
            f"with against without {median:+.1%} (quartiles {low:+.1%} to {high:+.1%})"
        )
    measuring.keep("meter", {"seconds": seconds, "marks": marks})


if __name__ == "__main__":
    start(main)
