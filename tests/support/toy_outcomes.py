"""Invented runs, as a benchmark would leave them: what tables, files and pages are tested with."""

from __future__ import annotations

import random
from dataclasses import replace

from edgespec.apps.bench.quantizations import FileFacts
from edgespec.apps.bench.runs import PLAIN, AccuracyScore, BenchmarkOutcome, Cell, ProblemsSolved, Run
from edgespec.platform.metering import Measurement

CATEGORIES = ("code", "chat", "summary", "translation")
UNREADABLE = (
    "the counters of this processor are readable by root only: sudo chmod a+r /sys/class/powercap/*/energy_uj"
)


def toy_run(coin, prompt, category, variant, round_, *, speed, source, watts, histogram):
    """A generation of 64 tokens; `source`: RAPL, assumed, unavailable or None."""
    speculative = variant != PLAIN
    seconds = 64 / speed * coin.uniform(0.97, 1.03)
    draft_s = 0.2 * seconds if speculative else 0.0
    energy = None
    if source in ("RAPL", "assumed"):
        joules = watts * seconds * coin.uniform(0.98, 1.02)
        phases = {
            "prefill": 0.1,
            "draft": 0.2 * speculative,
            "verify": 0.85 - 0.2 * speculative,
            "rest": 0.05,
        }
        energy = Measurement(
            seconds,
            joules,
            idle_w=5.0 if source == "RAPL" else None,
            domains={"package-0": joules} if source == "RAPL" else {},
            phases={phase: share * joules for phase, share in phases.items()},
            source="RAPL" if source == "RAPL" else "15 W assumed",
            estimated=source == "assumed",
        )
    elif source == "unavailable":
        energy = Measurement(seconds, None, reason=UNREADABLE)
    return Run(
        prompt=prompt,
        category=category,
        variant=variant,
        round=round_,
        prompt_tokens=90,
        tokens=64,
        total_s=seconds,
        ttft_s=0.1 * seconds,
        prefill_s=0.09 * seconds,
        draft_prefill_s=0.01 * seconds if speculative else 0.0,
        draft_s=draft_s,
        verify_s=0.84 * seconds - draft_s,
        rest_s=0.05 * seconds,
        n_emitted=63,
        histogram=histogram if speculative else ((0, 0, 63),),
        stop_reason="length",
        text_sha256=f"{prompt}-{coin.random() < 0.02}",
        energy=energy,
    )


def toy_cell(coin, target, draft, kernels, *, speed, variants=("auto",), source=None, rounds=2, prompts=2):
    runs = []
    watts = coin.uniform(12, 18)
    gamma = coin.choice((4, 5, 8))
    histogram = tuple((gamma, n, coin.randint(1, 9)) for n in range(gamma, -1, -1))
    gains = dict(zip(CATEGORIES, (1.9, 1.2, 1.6, 0.98), strict=True))
    for category in CATEGORIES:
        for i in range(prompts):
            for round_ in range(rounds):
                for number, variant in enumerate((PLAIN, *variants)):
                    gain = 1.0 if variant == PLAIN else gains[category] * (1 - 0.12 * (number - 1))
                    name = f"{category}/{i}"
                    runs.append(
                        toy_run(
                            coin,
                            name,
                            category,
                            variant,
                            round_,
                            speed=speed * gain,
                            source=source,
                            watts=watts,
                            histogram=histogram,
                        )
                    )
    return Cell(target, draft, kernels, tuple(runs), peak_rss_bytes=int(30e9 / speed))


def toy_outcome(kind="bench", *, source=None, accuracy=False, variants=("auto",), names=None, warnings=()):
    """A bench of one cell, or a compare of 18 cells and one that was skipped."""
    coin = random.Random(7)
    if kind == "bench":
        targets, drafts, kernels = ["qwen2.5-coder-1.5b-q4_k_m"], ["qwen2.5-coder-0.5b-q4_0"], ["avx2"]
    else:
        targets = [f"qwen2.5-coder-1.5b-{name}" for name in ("q8_0", "q4_k_m", "q2_k")]
        drafts = ["qwen2.5-coder-0.5b-q8_0", "qwen2.5-coder-0.5b-q4_0", None]
        kernels = ["avx2", "stock"]
    if names:
        targets, drafts = [names[0]], [names[1]]
    cells = [
        toy_cell(
            coin,
            target,
            draft,
            kernel,
            speed=(8 + 4 * i + j) * (1.25 if kernel == "avx2" else 1.0),
            variants=variants,
            source=source,
        )
        for i, target in enumerate(targets)
        for j, draft in enumerate(drafts)
        for kernel in kernels
    ]
    if kind == "compare":
        cells.insert(4, Cell("phi-3-mini-q4_k_m", drafts[0], "auto", skipped="their vocabularies differ"))
    facts = {
        name: FileFacts(name, f"{name}.gguf", f"{i:02x}" * 32, 10**9 + i, name.rpartition("-")[2].upper())
        for i, name in enumerate([*targets, *filter(None, drafts)])
    }
    scores = tuple(
        AccuracyScore(
            target=target,
            reference=targets[0],
            kernels=kernels,
            n_tokens=4096,
            perplexity=9.1 + 0.4 * i * i,
            kl=0.012 * i * i if i else None,
            kl_error=0.001 if i else None,
            top1=1 - 0.04 * i if i else None,
            passed=70 - 5 * i,
            n_problems=164,
        )
        for kernels in ("avx2", "stock")
        for i, target in enumerate(targets)
    )
    return BenchmarkOutcome(
        kind=kind,
        date="2026-11-21T19:00:00+00:00",
        machine={"processor": "AMD EPYC 7B13", "cores": 2, "memory": "8 GB", "edgespec": "0.1.0"},
        settings={"temperature": 0.0, "max_tokens": 64, "rounds": 2, "seed": 0},
        suite={"name": "edge", "sha256": "ab" * 32, "prompts": dict.fromkeys(CATEGORIES, 2)},
        models=facts,
        cells=tuple(cells),
        accuracy=scores if accuracy else (),
        warnings=tuple(warnings),
    )


LOSSY = ("cascade@0.4", "lenience-0.5")


def lossy_outcome(kind="bench", **options):
    """A toy outcome with two variants that are not exact; of one's tokens the target saw a quarter."""
    outcome = toy_outcome(kind, variants=("auto", *LOSSY), **options)

    def marked(run):
        if run.variant not in LOSSY:
            return run
        cascade = run.variant == LOSSY[0]
        return replace(
            run,
            exact=False,
            target_share=0.25 if cascade else 1.0,
            agreement=0.91 if cascade else 0.98,
            kl=0.0625 if cascade else None,
        )

    cells = tuple(replace(cell, runs=tuple(map(marked, cell.runs))) for cell in outcome.cells)
    solved = tuple(
        ProblemsSolved(cell.target, cell.draft, cell.kernels, LOSSY[0], 50, 164, 0.3)
        for cell in cells
        if cell.draft and cell.runs
    )
    return replace(outcome, cells=cells, solved=solved)
