"""A recipe is checked as a whole, and all its problems are reported at once."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from starling.errors import ConfigError
from starling.experiment.launching import check_engine
from starling.recipe import read_recipe
from starling.recipe.run import dump_recipe, recipe_digest
from starling.speech.recipe import check_recipe, fingerprints, load_recipe
from starling.training.speeds import Pause

Tree = dict[str, Any]
ALL = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
BASES = [path for path in ALL if "data" not in read_recipe(path)]
RECIPES = [  # a comparison is more than a recipe, and has tests of its own
    path for path in ALL if path not in BASES and "compare" not in read_recipe(path)
]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_the_recipes_that_come_with_starling_are_complete(path: Path) -> None:
    """Each loads, and the file written into the experiment's folder loads as the same recipe."""
    recipe = load_recipe(path)
    assert check_recipe(yaml.safe_load(dump_recipe(recipe)), "dumped") == recipe


@pytest.mark.parametrize("path", BASES, ids=lambda path: path.name)
def test_a_base_needs_nothing_but_data(path: Path, tree: Tree, tmp_path: Path) -> None:
    """A user's recipe needs only a name and the data; without data, the message asks for them."""
    own = tmp_path / "own.yaml"
    own.write_text(yaml.safe_dump({"base": str(path), "name": "own", "data": tree["data"]}), encoding="utf-8")
    recipe = load_recipe(own)
    assert recipe.name == "own"
    assert recipe.decoding is not None
    with pytest.raises(ConfigError, match="data: missing; a recipe must set it"):
        load_recipe(path)


def test_there_are_recipes() -> None:
    """The parametrisation above finds them."""
    assert {"demo.yaml", "fsdd.yaml", "speechocean.yaml"} <= {path.name for path in RECIPES}
    assert {path.name for path in BASES} == {"large.yaml", "small.yaml"}


def test_an_unknown_kind_of_corpus_lists_the_known_ones(tree: Tree) -> None:
    """The message has its key, but not the words of the validation library."""
    tree["data"]["corpus"]["kind"] = "kaldii"
    with pytest.raises(ConfigError) as caught:
        check_recipe(tree, "r.yaml")
    assert "data.corpus.kind: 'kaldii' is unknown; did you mean 'kaldi'? known are tsv, kaldi, " in str(caught.value)
    del tree["data"]["corpus"]["kind"]
    with pytest.raises(ConfigError, match=r"data\.corpus\.kind: missing; a recipe must set it"):
        check_recipe(tree, "r.yaml")


def test_a_section_without_content_is_named(tree: Tree) -> None:
    """`budget:` with nothing behind it is YAML's null."""
    tree["budget"] = None
    with pytest.raises(ConfigError, match=r"budget: must be a mapping of keys to values, got None"):
        check_recipe(tree, "r.yaml")


def test_all_problems_are_listed_at_once(tree: Tree) -> None:
    """Unknown keys, wrong types, impossible values, an unknown strategy and optimizer make one message, with a line
    each."""
    tree["learnrs"] = 3
    tree["seed"] = -1
    tree["budget"] = {"epochs": "three"}
    tree["data"]["corpus"]["pth"] = "x"
    tree["model"]["lr"] = 0.1
    tree["optimizer"]["name"] = "adamm"
    tree["strategy"] = "allreduc"
    tree["cluster"] = {"compute": {"distribution": "uniform", "spread": 2}}
    tree["stragglers"] = {"slow": {"1": "10x", 2: 3}, "pauses": [{"learner": 7, "after": 1, "seconds": 1}]}
    del tree["name"]
    with pytest.raises(ConfigError) as caught:
        check_recipe(tree, "r.yaml")
    first, *lines = str(caught.value).splitlines()
    assert first == "recipe r.yaml: 11 problems"
    starts = {
        "  learnrs: unknown key; did you mean learners?",
        "  seed: input should be greater than or equal to 0, got -1",
        "  budget.epochs: input should be a valid integer",
        "  data.corpus.pth: unknown key; did you mean data.corpus.path?",
        "  model.lr: unknown key; did you mean optimizer.lr?",
        "  optimizer: name: 'adamm' is not in torch.optim; did you mean 'adam'",
        "  strategy: 'allreduc' is unknown; did you mean 'allreduce'?",
        "  cluster.compute: a uniform spread of 2.0 would give negative times",
        "  stragglers.slow.2: there is no learner 2 among 2; the last is learner 1",
        "  stragglers.pauses.0.learner: there is no learner 7 among 2; the last is learner 1",
        "  name: missing",
    }
    assert all(any(line.startswith(start) for line in lines) for start in starts), lines
    assert len(lines) == len(starts)


def test_a_wrong_option_of_a_strategy_is_a_problem_of_that_key(tree: Tree) -> None:
    """Options are checked by the strategy's own model."""
    tree["strategy"] = {"name": "allreduce", "patern": "ring"}
    with pytest.raises(ConfigError, match=r"strategy\.patern: unknown key"):
        check_recipe(tree, "r.yaml")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"slow": {0: "fast"}},
            "stragglers.slow.0: input should be a valid number, unable to parse string as a number",
        ),
        ({"slow": {0: "0.5x"}}, "stragglers.slow.0: input should be greater than or equal to 1, got"),
        ({"slwo": {0: 2}}, "stragglers.slwo: unknown key; did you mean stragglers.slow?"),
        ({"pauses": [{"learner": 0, "after": 0, "seconds": 1}]}, "stragglers.pauses.0.after: input should be greater"),
        ({"pauses": [{"learner": 0, "after": 1}]}, "stragglers.pauses.0.seconds: missing"),
        (None, "stragglers: must be a mapping of keys to values, got None"),
    ],
)
def test_an_impossible_straggler_is_a_problem_of_its_key(tree: Tree, change: Tree | None, problem: str) -> None:
    """There is one problem, worded like the others."""
    tree["stragglers"] = change
    with pytest.raises(ConfigError) as caught:
        check_recipe(tree, "r.yaml")
    first, line = str(caught.value).splitlines()
    assert first == "recipe r.yaml: a problem"
    assert line.startswith(f"  {problem}")


def test_a_value_that_is_not_a_path_is_a_problem_in_plain_words(tree: Tree) -> None:
    tree["resume"] = True
    with pytest.raises(ConfigError, match="resume: must be a path, got True"):
        check_recipe(tree, "r.yaml")


def test_stragglers_are_written_in_natural_notation(tree: Tree, tmp_path: Path) -> None:
    """The value is `10x` in a file or an override, which wins; the dumped recipe is the same."""
    tree["stragglers"] = {"slow": {0: "10x"}, "pauses": [{"learner": 1, "after": 10, "seconds": 5}]}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(tree))
    recipe = load_recipe(tmp_path / "r.yaml")
    assert recipe.stragglers.slow == {0: 10.0}
    assert recipe.stragglers.pauses == (Pause(learner=1, after=10, seconds=5.0),)
    assert check_recipe(yaml.safe_load(dump_recipe(recipe)), "dumped") == recipe
    both = load_recipe(tmp_path / "r.yaml", ["stragglers.slow.0=3x", "stragglers.slow.1=2", "stragglers.jitter=0.1"])
    assert both.stragglers.slow == {0: 3.0, 1: 2.0}
    assert recipe_digest(both) != recipe_digest(recipe)


def test_slow_learners_are_no_longer_a_setting_of_the_cluster(tree: Tree) -> None:
    """The message names the place where they are now."""
    tree["cluster"] = {"compute": {"slow": {0: 10}}}
    with pytest.raises(ConfigError, match=r"cluster\.compute\.slow: unknown key; did you mean stragglers\.slow\?"):
        check_recipe(tree, "r.yaml")


def test_joining_a_run_that_ends_at_a_loss_is_refused(tree: Tree) -> None:
    """Its learners are not told of each other; otherwise a name may come that is not one of the first."""
    join = {"faults": [{"join": 9, "at_seconds": 1.0}]}
    assert check_recipe(tree | join, "r.yaml").faults
    with pytest.raises(ConfigError, match=r"no learner can join a run with on_loss: stop; remove the join or on_loss"):
        check_recipe(tree | join | {"on_loss": "stop"}, "r.yaml")


@pytest.mark.parametrize("choice", ["hadpsgd", {"name": "hadpsgd"}])
def test_a_required_option_of_a_strategy_is_asked_for(tree: Tree, choice: object) -> None:
    """This holds however the strategy is named."""
    with pytest.raises(ConfigError, match=r"strategy\.per_node"):
        check_recipe(tree | {"strategy": choice}, "r.yaml")


def test_a_weighting_that_the_strategy_cannot_use_is_one_problem_among_others(tree: Tree) -> None:
    """Only learners that average their gradients can weight them."""
    tree |= {"batches": {"weighting": "frames"}, "learners": 2}
    served = {"name": "parameter-server", "update": "hybrid"}
    for strategy in ("allreduce", served, {"name": "hadpsgd", "per_node": 2}):
        assert check_recipe(tree | {"strategy": strategy}, "r.yaml").batches.weighting == "frames"
    for strategy in ("adpsgd", "delay-by-one", "parameter-server", {"name": "hadpsgd", "per_node": 1}):
        with pytest.raises(ConfigError) as caught:
            check_recipe(tree | {"strategy": strategy, "seed": -1}, "r.yaml")
        _, *lines = str(caught.value).splitlines()
        assert [line.split(":")[0] for line in lines] == ["  seed", "  batches.weighting"]


@pytest.mark.parametrize("learners", [3, "3"])
def test_a_strategy_that_does_not_fit_the_learners_is_one_problem_among_others(tree: Tree, learners: object) -> None:
    """The problem is reported before any process starts."""
    tree |= {"learners": learners, "strategy": {"name": "hadpsgd", "per_node": 2}, "seed": -1}
    with pytest.raises(ConfigError) as caught:
        check_recipe(tree, "r.yaml")
    _, *lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["  seed", "  strategy.per_node"]
    assert lines[1].endswith("3 learners cannot be divided into super-learners of 2")
    tree["learners"] = 0
    with pytest.raises(ConfigError) as caught:
        check_recipe(tree, "r.yaml")
    _, *lines = str(caught.value).splitlines()
    assert {line.split(":")[0] for line in lines} == {"  learners", "  seed"}


@pytest.mark.parametrize(
    ("strategy", "sync_group_size"),
    [("allreduce", 4), ("adpsgd", 1), ({"name": "hadpsgd", "per_node": 2}, 2)],
    ids=["all", "alone", "a super-learner"],
)
def test_the_strategy_determines_who_claims_together(tree: Tree, strategy: object, sync_group_size: int) -> None:
    """Learners of a synchronous strategy claim together, those of a super-learner do, or each claims alone."""
    assert check_recipe({**tree, "learners": 4, "strategy": strategy}, "r.yaml").sync_group_size == sync_group_size


def test_another_number_of_learners_is_checked_instead_of_the_first(tree: Tree, tmp_path: Path) -> None:
    """torchrun may start a different number than the recipe says; the recipe's own number need not fit then."""
    tree |= {"learners": 1, "strategy": {"name": "hadpsgd", "per_node": 2}, "stragglers": {"slow": {3: 2}}}
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert load_recipe(path, learners=6) == check_recipe({**tree, "learners": 6}, "r.yaml")
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, learners=3)
    first, *lines = str(caught.value).splitlines()
    assert first.endswith("r.yaml: 2 problems")
    assert {line.split(":")[0] for line in lines} == {"  strategy.per_node", "  stragglers.slow.3"}


@pytest.mark.parametrize(
    ("optimizer", "problem"),
    [
        ({"name": "sgd", "options": {"momentun": 0.9}}, "SGD has no 'momentun'; did you mean 'momentum'"),
        ({"name": "SGD", "options": {"momentum": -1}}, "SGD cannot train .*Invalid momentum"),
        ({"name": "lbfgs"}, "LBFGS computes the loss several times per step, .*use another, such as adamw"),
        ({"name": "muon", "options": {"momentun": 0.9}}, "Muon has no 'momentun'; did you mean 'momentum'"),
        ({"name": "sparseadam"}, "SparseAdam cannot train"),
        ({"lr": "fast"}, r"optimizer\.lr: input should be a valid number"),
        ({"lr": float("nan")}, r"optimizer\.lr"),
        ({"schedule": {"warm_up": 0.1}}, r"optimizer\.schedule\.warm_up: unknown key; did you mean optimizer\.sch"),
    ],
)
def test_an_optimizer_that_cannot_train_is_refused_before_anything_starts(
    tree: Tree, optimizer: Tree, problem: str
) -> None:
    """It is tried on a matrix and a vector."""
    tree["optimizer"] = optimizer
    with pytest.raises(ConfigError, match=problem):
        check_recipe(tree, "r.yaml")


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "", "a" * 200])
def test_a_name_cannot_lead_out_of_the_folder_of_experiments(tree: Tree, name: str) -> None:
    """The name becomes a folder's name."""
    tree["name"] = name
    with pytest.raises(ConfigError, match="name"):
        check_recipe(tree, "r.yaml")


def test_optimizers_are_known_in_any_case(tree: Tree) -> None:
    """`AdamW`, `adamw` and `ADAMW` are one."""
    for name in ("AdamW", "adamw", "ADAMW"):
        tree["optimizer"] = {"name": name}
        assert check_recipe(tree, "r.yaml").optimizer.name == name


@pytest.mark.parametrize(
    ("model", "digest"),
    [
        ({"preset": "tiny"}, "a21b1393f1e3cf91c495eb5bb344b037e80199a55d290a0b007406bab3ead3ba"),
        ({"preset": "tiny", "heads": None}, "a21b1393f1e3cf91c495eb5bb344b037e80199a55d290a0b007406bab3ead3ba"),
        (
            {"preset": "tiny", "hidden": "48", "dropout": 0},
            "e50cc144b26ed2cfc097f77d5aded415359557e6691e6c164dae731c382f11f9",
        ),
        (
            {"name": "zipformer", "preset": "tiny", "stack_rates": [1, 2, 2]},
            "3b365c79c2c578c5271e29066085832f8ea6937c6e1b40f2e3109aaa47a4a1fa",
        ),
        (
            {"name": "transformer", "preset": "tiny", "positions": "sinusoidal", "phones": {"layer": 2}},
            "26c75bd3eee09230306629281ee1fff2acd7fe05e4cac676326c3acf08993410",
        ),
    ],
    ids=str,
)
def test_the_fingerprint_of_a_model_is_that_of_earlier_checkpoints(tree: Tree, model: Tree, digest: str) -> None:
    """It depends on the sizes that a recipe sets, and not on the architecture's name in the source."""
    assert fingerprints(check_recipe({**tree, "model": model}, "r.yaml"))["model"] == digest


def test_the_fingerprint_of_a_section_changes_with_what_a_resume_needs(tree: Tree) -> None:
    """The model's size changes it; the budget, the learning rate and the place of the data do not."""
    before = fingerprints(check_recipe(tree, "r.yaml"))
    other = copy.deepcopy(tree)
    other["budget"] = {"steps": 3}
    other["optimizer"]["lr"] = 0.5
    other["learners"] = 7
    assert fingerprints(check_recipe(other, "r.yaml")) == before
    other["model"]["preset"] = "small"
    other["data"]["sampling_rate"] = 16000
    after = fingerprints(check_recipe(other, "r.yaml"))
    assert {section for section in before if before[section] != after[section]} == {"model", "data"}


def test_a_resume_needs_the_same_windows_mixture_and_parts(tree: Tree) -> None:
    """They determine which batch belongs to whom; with a part for each learner, the number of learners is fixed,
    too."""
    tree["mixture"] = {"domains": {"a": {"sets": "train"}, "b": {"sets": "test"}}}
    before = fingerprints(check_recipe(tree, "r.yaml"))
    for change, section in (
        ({"batches": {**tree["batches"], "window": 5}}, "batches"),
        ({"batches": {**tree["batches"], "similar": 4}}, "batches"),
        ({"mixture": {**tree["mixture"], "temperature": 0.5}}, "mixture"),
        ({"partition": "domain"}, "partition"),
    ):
        after = fingerprints(check_recipe({**tree, **change}, "r.yaml"))
        assert {name for name in before if before[name] != after[name]} == {section}
    divided = [fingerprints(check_recipe({**tree, "partition": "domain", "learners": n}, "r.yaml")) for n in (2, 3)]
    assert divided[0]["partition"] != divided[1]["partition"]


def test_data_of_a_mixture_are_part_of_the_fingerprint(tree: Tree) -> None:
    """A different set in it is different data."""
    tree["mixture"] = {"domains": {"a": {"sets": ["train"]}}}
    before = fingerprints(check_recipe(tree, "r.yaml"))
    tree["mixture"] = {"domains": {"a": {"sets": ["train", "test"]}}}
    assert fingerprints(check_recipe(tree, "r.yaml"))["data"] != before["data"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"partition": "domain"}, "it divides domains, but there is no mixture"),
        ({"partition": {"kind": "dirichlet", "alpha": 1, "by": "domain"}}, "there is no mixture"),
        ({"partition": "speakers"}, "partition: "),
        ({"mixture": {"domains": {"a": {"sets": "trian"}}}}, "'trian' is neither a set of data.corpus"),
        ({"partition": {"kind": "dirichlet", "alpha": 0}}, "greater than 0"),
        (
            {"partition": "speaker", "mixture": {"domains": {"a": {"sets": "train"}}, "temperature": 0.5}},
            "the mixture's shares have no effect",
        ),
    ],
)
def test_a_partition_that_cannot_be_made_is_refused(tree: Tree, change: Tree, problem: str) -> None:
    """It is refused before any data is opened."""
    with pytest.raises(ConfigError, match=problem):
        check_recipe({**tree, **change}, "r.yaml")


def test_learners_of_different_recipes_have_different_digests(tree: Tree) -> None:
    """Any key that changes a result changes the digest."""
    before = recipe_digest(check_recipe(tree, "r.yaml"))
    assert before == recipe_digest(check_recipe(copy.deepcopy(tree), "elsewhere.yaml"))
    tree["optimizer"]["lr"] = 0.02
    assert before != recipe_digest(check_recipe(tree, "r.yaml"))


def test_faults_that_only_a_simulation_knows_are_refused_before_processes_start(tree: Tree) -> None:
    """The error has their places; the recipe itself is valid for `starling simulate`."""
    faults = [{"kill": 0, "at_step": 3}, {"kill": 0, "at_event": 3}, {"split": [0], "at_seconds": 1, "seconds": 1}]
    with pytest.raises(ConfigError) as caught:
        check_engine(check_recipe({**tree, "faults": faults}, "r.yaml"))
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == ["faults.1", "faults.2"]


def test_a_wrong_fault_is_one_problem(tree: Tree) -> None:
    """It is not one for each kind of fault that it might have been."""
    faults = [
        {"kil": 0, "at_step": 4},
        {"pause": 0, "seconds": -5},
        7,
        {"kill": 0, "at_stp": 3},
        {"kill": 0, "at_step": 1, "at_event": 3},
    ]
    with pytest.raises(ConfigError) as caught:
        check_recipe({**tree, "faults": faults}, "r.yaml")
    assert [line.strip() for line in str(caught.value).splitlines()[1:]] == [
        "faults.0: must be a mapping with one of the keys kill, pause, nan, split, join, got {'kil': 0, 'at_step': 4}",
        "faults.1.seconds: input should be greater than 0, got -5",
        "faults.2: must be a mapping with one of the keys kill, pause, nan, split, join, got 7",
        "faults.3.at_stp: unknown key; did you mean faults.at_step?",
        "faults.4: give exactly one of at_step, at_seconds and at_event",
    ]


def test_the_error_for_a_missing_dev_set_names_its_key(tree: Tree) -> None:
    """The set is the default of that key, so nothing in the recipe hints at it."""
    del tree["data"]["valid"]
    with pytest.raises(
        ConfigError, match=r"data\.valid names the set 'dev', which is not in data\.corpus\.sets"
    ) as caught:
        check_recipe(tree, "r.yaml")
    assert "set data.valid=null for none" in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"patience": 3}, "patience: needs the scores of a validation set: set data.valid and validate_every"),
        ({"average": 3}, "average: 3 checkpoints, but checkpoints.keep is 2; raise that"),
    ],
)
def test_an_impossible_end_is_refused(tree: Tree, keys: Tree, problem: str) -> None:
    """Early stopping without scores, and a mean of checkpoints that are not kept, are refused."""
    tree["data"]["valid"] = None
    with pytest.raises(ConfigError) as caught:
        check_recipe({**tree, **keys}, "r.yaml")
    assert problem in str(caught.value)
