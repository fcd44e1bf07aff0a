"""What the energy meter costs: the same generations with and without it, in turns.

Where nothing counts energy, as in a virtual machine, the meter reads made-up counters of the same form in a
folder (--fake, best on a tmpfs): a plain file instead of the processor's register, which costs a little more.
Beside the ratio, which a noisy machine blurs, stands the cost that follows from the meter's own clock:
seconds a reading x readings a step, over the seconds of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from edgespec import Engine, SamplingParams
from edgespec.energy import EnergyMeter
from machine import facts, other_load, save, spread

PROMPT = "Write a quicksort in Python."
GOAL = 0.005
MARKS = 5
"""Readings a step that drafts: edgespec/generate.py."""


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fake", type=Path, metavar="DIR", help="make counters below a new folder in DIR")
    parser.add_argument("-n", "--n-predict", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--save", action="store_true", help="write bench/results/meter-...json")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory(dir=args.fake) as folder:
        root = fake_tree(Path(folder)) if args.fake else Path("/")
        with EnergyMeter.choose(root) as meter:
            if not meter.available:
                raise SystemExit(f"{meter.reason}; give --fake /dev/shm")
            measure(meter, args)


def measure(meter: EnergyMeter, args: argparse.Namespace) -> None:
    loads = [other_load()]
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    steps_s = []
    with Engine(meter=meter) as engine:
        for round_ in range(args.rounds + 1):
            for way in sorted(seconds, reverse=bool(round_ % 2)):
                engine.meter = meter if way == "with" else None
                engine.forget()
                result = engine.generate(
                    PROMPT, params=SamplingParams(temperature=0), n_predict=args.n_predict
                )
                if round_:  # the first one warms up
                    seconds[way].append(result.stats.total_s)
                    steps_s.append(result.stats.total_s / max(1, result.stats.steps))
    loads.append(other_load())
    ratios = [a / b - 1 for a, b in zip(seconds["with"], seconds["without"], strict=True)]
    median, low, high = spread(ratios)
    reading_s = meter.reading_s or 0.0
    step_s = statistics.median(steps_s)
    share = reading_s * MARKS / step_s
    print(f"{facts(loads)['processor']}; {meter.source}")
    print(f"with against without, {args.rounds} rounds: {median:+.2%} (quartiles {low:+.2%} to {high:+.2%})")
    print(
        f"a reading takes {1e6 * reading_s:.1f} us, {MARKS} a step of {1e3 * step_s:.1f} ms: "
        f"{share:.3%}   {'met' if share < GOAL else 'MISSED'}: below {GOAL:.1%}"
    )
    outcome = {
        "machine": facts(loads),
        "command": sys.argv,
        "seconds": seconds,
        "reading_s": reading_s,
        "share": share,
    }
    if args.save:
        save("meter", json.loads(json.dumps(outcome)), loads)


if __name__ == "__main__":
    main()
