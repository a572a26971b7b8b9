"""What must stay as it is while the code changes: run names, drawn data, benchmark items and
rewritten captions.

`golden.json` contains a digest of each. After a deliberate change, write it again with
`python tests/test_golden.py` and say in the commit what changed: committed runs and kept scores
belong to the digests that they were made with.
"""

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest
import torch

from compvl.benchmarks import list_benchmarks, load_benchmark, load_benchmarks
from compvl.core import CompvlError
from compvl.microworld import FinetuneSet, PretrainSet
from compvl.microworld.render import render
from compvl.microworld.scenes import scenes
from compvl.microworld.splits import SPLITS
from compvl.paper.profiles import PROFILES
from compvl.paper.rows import ROWS
from compvl.paper.runs import config_name, run_config, seeds_of
from compvl.paper.table_rows import HP_TABLE8
from compvl.text import (
    NEGATIVES,
    POSITIVES,
    Refused,
    apply_operator,
    classify,
    hard_negative,
    hard_positive,
    parse,
)

GOLDEN = Path(__file__).with_name("golden.json")
CAPTIONS = [
    "A small brown dog is chasing a red ball in front of two parked cars.",
    "Two men in black suits and a woman in a white dress stand near an old church.",
    "A bowl of fresh fruit and a glass of milk on a wooden table.",
    "The tall boy holding a blue kite runs along the sandy beach.",
    "Several sheep graze in a green field behind a broken fence.",
    "A cat sleeping on top of a closed laptop next to a cup of coffee.",
    "There are three colorful umbrellas hanging from the ceiling of a restaurant.",
    "A man riding a wave on top of a surfboard.",
    "An empty street with tall buildings and a yellow taxi.",
    "A young girl with long hair is eating a slice of pizza.",
    "A large white bird stands in shallow water and looks at a fish.",
    "Some people are sitting on benches under the trees in the park.",
    "A black and white photograph of an old steam train leaving the station.",
    "The kitchen has wooden cabinets, a silver stove and a large window.",
    "A baseball player swings his bat while the catcher kneels behind him.",
    "A teddy bear wearing a pink hat sits between two books.",
    "Two giraffes and a zebra are standing inside a fenced enclosure.",
    "A plate topped with broccoli, rice and grilled chicken.",
    "A woman is not wearing her glasses while reading a newspaper.",
    "An airplane flying above snowy mountains during sunset.",
    "A motorcycle parked beside a brick wall covered with graffiti.",
    "A group of skiers going down a steep hill.",
    "The clean bathroom contains a toilet, a sink and a round mirror.",
    "A boy in a striped shirt feeds an elephant with his left hand.",
    "A couple of kids playing frisbee on the grass with their dog.",
    "A computer desk with two monitors, a keyboard and a mouse on it.",
    "An elderly man sits alone on a bench overlooking the calm sea.",
    "A bunch of ripe bananas hanging from a tree.",
    "The red double-decker bus is driving down a narrow street.",
    "A vase of purple flowers on a small table by the window.",
    "Children are flying kites in a cloudy sky over the open field.",
    "A horse pulling a carriage with two passengers through the city.",
    "A chef in a white uniform is cutting vegetables and a helper washes the dishes.",
    "A broken umbrella lies on the wet ground near a trash can.",
    "A skateboarder jumping over a set of stairs in front of a crowd.",
    "A little boy and his father brush their teeth in front of a mirror.",
]


def plain(value):
    """A value as JSON knows it, without the names of classes."""
    if dataclasses.is_dataclass(value):
        return [plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, torch.Tensor):
        if value.dtype == torch.uint8:
            value = coarse(value)
        return hashlib.sha256(value.numpy().tobytes()).hexdigest()
    return value if value is None or isinstance(value, (bool, int, str)) else repr(value)


def coarse(pictures: torch.Tensor) -> torch.Tensor:
    """Mean brightness of each quarter of pictures in steps of 8: uint8 [..., 2, 2].

    Processors round differently, so that now and then a pixel differs by 1."""
    quarters = torch.nn.functional.adaptive_avg_pool2d(pictures.double(), 2)
    return (quarters / 8).to(torch.uint8)


def digest(value) -> str:
    """The first 16 hexadecimal digits of a value's SHA-256."""
    return hashlib.sha256(json.dumps(plain(value), sort_keys=True).encode()).hexdigest()[:16]


def run_names() -> dict:
    """Names of the runs of every row in every profile of the microworld, first and last seed."""
    names = {}
    for profile in PROFILES.values():
        if profile.data != "microworld":
            continue
        for row in [*ROWS.values(), *HP_TABLE8]:
            seeds = seeds_of(row, profile)  # none where the microworld has no such model
            for seed in sorted({*seeds[:1], *seeds[-1:]}):
                config = run_config(row, profile, seed)
                if config is None:
                    continue
                names[f"{profile.name}/{row.key}/{seed}"] = config_name(config)
    return names


def benchmark_items() -> dict:
    """Digests of 60 items of every benchmark that the microworld draws."""
    digests = {}
    for name in list_benchmarks():
        try:
            benchmark = load_benchmark(name, n=60)
        except CompvlError:
            continue
        digests[name] = digest([benchmark.items, benchmark.classes, benchmark.templates])
    return digests


def drawn() -> dict:
    """Digests of scenes and pictures, and of a batch of all kinds of training data of the rows."""
    worlds = {split: scenes(split, 64) for split in SPLITS}
    digests = {f"scenes/{split}": digest(world) for split, world in worlds.items()}
    digests["render"] = digest(render(worlds["test"], 48))
    digests["pretrain"] = digest(PretrainSet(64).batch(range(64)))
    options = {
        json.dumps([row.kinds, row.data_options], sort_keys=True)
        for row in ROWS.values()
        if row.source == "trained"
    }
    for option in sorted(options):
        kinds, other = json.loads(option)
        digests[f"finetune/{option}"] = digest(
            FinetuneSet(40, kinds=kinds, **other).batch(range(40))
        )
    return digests


def attempt(function, *args, **kwargs):
    """What a function returns, or the message with which it refuses."""
    try:
        return plain(function(*args, **kwargs))
    except Refused as refusal:
        return str(refusal)


def rewritten() -> dict:
    """Digests of what the text pipelines make of COCO-like and of the microworld's captions."""
    pairs = [pair for part in load_benchmarks("sugarcrepe", n=20) for pair in part.items]
    captions = CAPTIONS + [pair.caption for pair in pairs[::4]]
    digests = {"parse": digest([parse(caption) for caption in captions])}
    digests["classify"] = digest([plain(classify(pair.caption, pair.foil)) for pair in pairs])
    for operator in ("swap", "replace", "add"):
        for k in (1, 2):
            made = [attempt(apply_operator, caption, operator, seed=3, k=k) for caption in captions]
            digests[f"{operator}-{k}"] = digest(made)
    for method in NEGATIVES:
        if method != "svlc-lm":
            made = [attempt(hard_negative, caption, method, 5) for caption in captions]
            digests[f"negative/{method}"] = digest(made)
    for method in POSITIVES:
        made = [attempt(hard_positive, caption, method, 5) for caption in captions]
        digests[f"positive/{method}"] = digest(made)
    return digests


PARTS = {
    "run names": run_names,
    "benchmark items": benchmark_items,
    "drawn data": drawn,
    "rewritten captions": rewritten,
}


@pytest.mark.parametrize("part", PARTS)
def test_golden(part):
    """Every digest is what it was."""
    expected = json.loads(GOLDEN.read_text("utf-8"))[part]
    found = PARTS[part]()
    keys = sorted(expected.keys() | found.keys())
    different = [key for key in keys if expected.get(key) != found.get(key)]
    examples = ", ".join(different[:8])
    assert not different, f"{part}: {len(different)} of {len(expected)} differ: {examples}"


if __name__ == "__main__":
    made = {name: function() for name, function in PARTS.items()}
    GOLDEN.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
