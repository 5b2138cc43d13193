"""Rules of the house that a machine can check."""

import ast
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
PROGRAMS = [*SOURCES, *EXAMPLES]
RECIPES = sorted((ROOT / "recipes").rglob("*.y*ml"))
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
FORBIDDEN_NAMES = {
    *("eval", "exec", "__import__"),
    *("torch.load", "torch.save", "torch.hub.load", "torch.jit.load"),
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
    *("asyncio.create_subprocess_shell", "pandas.read_pickle", "pd.read_pickle"),
    *("yaml.load_all", "yaml.full_load", "yaml.full_load_all", "yaml.unsafe_load", "yaml.unsafe_load_all"),
}
FORBIDDEN_METHODS = {
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
    *("extractall", "unpack_archive"),
}
SAFE_LOADERS = {"yaml.SafeLoader", "yaml.CSafeLoader"}
PICKLES_AMONG_OWN_PROCESSES = {
    "starling/training/loading.py": "a learner's loading processes",
    "starling/comparing/compare.py": "the processes of `jobs`",
    "starling/worker_processes.py": "starts those, and the next ones",
    "starling/engines/virtual/computation.py": "processes that compute gradients of a simulation",
    "starling/speech/prepare_stages.py": "the processes of `jobs=N`",
    "starling/speech/decoding/beam.py": "the processes of `evaluate --jobs`",
}
"""Modules that start processes of their own, with which Python talks in pickles through inherited pipes."""
PICKLES_ITSELF = {"starling/experiment/launching.py": "a job, for the learners of `starling.train`; see decision 0008"}
"""The one module that may call `pickle`: a launcher writes a file that only its own learners read."""
EVALUATES = {"starling/experiment/replay.py": "an expression that the user gives on the command line, as `--watch`"}
"""The one module that may call `eval`: on nothing that came from a file or over a network."""
PICKLES_OVER_THE_NETWORK = {
    "starling/speech/prepare_stages.py": "`executor=ray`, see SECURITY.md",
    "starling/launch/on_ray.py": "`launch: ray`, see SECURITY.md",
}
"""The exceptions: cluster engines send pickles over connections of their own."""
EXAMPLES_ON_CLUSTER_ENGINES = {
    "examples/ray_actors.py": "actors of one's own",
    "examples/ray_train.py": "workers of one's own",
}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def faults(text: str) -> list[str]:
    """What a program must not do, each with its line."""
    tree = ast.parse(text)
    safe = SAFE_LOADERS | {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any(dotted(base) in SAFE_LOADERS for base in node.bases)
    }
    return [f"line {getattr(node, 'lineno', 0)}: {fault}" for node in ast.walk(tree) if (fault := _fault(node, safe))]


def _fault(node: ast.AST, safe_loaders: set[str]) -> str:
    if isinstance(node, ast.Assert):
        return "assert"
    if isinstance(node, ast.Import):
        return ", ".join(name.name for name in node.names if name.name.partition(".")[0] in FORBIDDEN_IMPORTS)
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        if module.partition(".")[0] in FORBIDDEN_IMPORTS:
            return module
        names = [f"{module}.{each.name}" for each in node.names]
        return ", ".join(name for name in names if name in FORBIDDEN_NAMES or _last(name) in FORBIDDEN_METHODS)
    if isinstance(node, ast.Attribute | ast.Name):
        name = dotted(node)
        return name if name in FORBIDDEN_NAMES or _last(name) in FORBIDDEN_METHODS else ""
    return _fault_of_call(node, safe_loaders) if isinstance(node, ast.Call) else ""


def _fault_of_call(node: ast.Call, safe_loaders: set[str]) -> str:
    name = dotted(node.func)
    keywords = {each.arg: each.value for each in node.keywords}
    if "shell" in keywords:
        return f"{name}(shell=)"
    pickles = keywords.get("allow_pickle")
    if pickles is not None and not (isinstance(pickles, ast.Constant) and pickles.value is False):
        return f"{name}(allow_pickle=)"
    if name == "yaml.load":
        loader = dotted([*node.args[1:2], keywords.get("Loader", ast.Name(""))][0])
        return "" if loader in safe_loaders else f"yaml.load with the loader {loader or 'that is the default'}"
    if isinstance(node.func, ast.Attribute) and node.func.attr == "extract":
        return f"{name}: names in an archive lead anywhere"
    return ""


def _last(name: str) -> str:
    return name.rpartition(".")[2]


@pytest.mark.parametrize("file", PROGRAMS, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_pickle_no_eval_no_shell_no_assert(file: Path) -> None:
    """Weights are safetensors and the rest is JSON; input is checked by errors, for `assert` is gone under -O."""
    found = faults(file.read_text(encoding="utf-8"))
    for kind, modules in (("pickle", PICKLES_ITSELF), ("eval", EVALUATES)):
        if file in SOURCES and file.relative_to(ROOT / "src").as_posix() in modules:
            found = [fault for fault in found if not fault.endswith(f": {kind}")]
    assert not [fault for fault in found if file in SOURCES or not fault.endswith(": assert")]


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import marshal as m",
        "from shelve import open",
        "import dill",
        "from cloudpickle import loads",
        "from torch import load",
        "torch.load(path, weights_only=True)",
        "read = torch.load",
        "dist.all_gather_object(found, mine)",
        "torch.distributed.broadcast_object_list(found)",
        "from torch.distributed import gather_object",
        "dist.scatter_object_list(a, b)",
        "yaml.load(text)",
        "yaml.load(text, yaml.Loader)",
        "yaml.load(text, Loader=yaml.FullLoader)",
        "yaml.unsafe_load(text)",
        "tar.extract(member, folder)",
        "tarfile.open(path).extractall(folder)",
        "shutil.unpack_archive(path)",
        "subprocess.run(line, shell=True)",
        "subprocess.Popen(line, shell=wanted)",
        "os.system(line)",
        "from os import system",
        "os.popen(line)",
        "subprocess.getoutput(line)",
        "np.load(path, allow_pickle=True)",
        "eval(text)",
        "exec(text)",
        "assert text",
    ],
)
def test_the_rules_find_what_they_forbid(line: str) -> None:
    """Each of these lines, planted in a program, is found."""
    assert len(faults(f"def work():\n    {line}\n")) >= 1


def test_the_rules_leave_alone_what_is_allowed() -> None:
    """A loader made from YAML's safe one, arrays without pickle, a list of arguments, one member of a tar."""
    program = """
class Loader(yaml.SafeLoader): ...
yaml.load(text, Loader), yaml.load(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
np.load(path, allow_pickle=False), subprocess.run([program, argument]), tar.extractfile(member)
"""
    assert faults(program) == []


def _pickling_imports(file: Path) -> set[str]:
    """Libraries that pickle by themselves, among those that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{each.name}" for each in node.names]
        for name in names:
            first = name.partition(".")[0]
            is_loader = name == "torch.utils.data.DataLoader" or name.startswith("torch.multiprocessing")
            if first in ("dask", "distributed", "ray", "multiprocessing") or _last(name) == "ProcessPoolExecutor":
                found.add("network" if first in ("dask", "distributed", "ray") else "own")
            elif is_loader:
                found.add("own")
    return found


def test_only_cluster_engines_send_pickles_over_the_network() -> None:
    """And only to a loading, preparing or comparing process of its own does Starling let Python pickle at all."""
    found = {file.relative_to(ROOT / "src").as_posix(): _pickling_imports(file) for file in SOURCES}
    assert {name for name, kinds in found.items() if "network" in kinds} == PICKLES_OVER_THE_NETWORK.keys()
    own = {name for name, kinds in found.items() if "own" in kinds}
    assert own == PICKLES_AMONG_OWN_PROCESSES.keys() | PICKLES_ITSELF.keys()
    pickling = {file.relative_to(ROOT).as_posix(): kinds for file in EXAMPLES if (kinds := _pickling_imports(file))}
    assert pickling == {key: {"network"} for key in EXAMPLES_ON_CLUSTER_ENGINES}


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: str(file.relative_to(ROOT)))
def test_recipes_are_plain_yaml(file: Path) -> None:
    """No tag, so nothing that YAML would make an object of."""
    assert not [token for token in yaml.scan(file.read_text(encoding="utf-8")) if isinstance(token, yaml.TagToken)]
