"""Synthetic data in place of downloads.

Keyed by the dataset, never by the program: the arrays have the shapes and dtypes of the real
datasets, and random values of a fixed seed. A file or dataset that is not known here raises
`Unknown`, so that the program counts as not run instead of training on nonsense.
"""

import functools
import importlib
import importlib.machinery
import importlib.util
import sys
import types
import urllib.parse
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

ROWS = 1024
_DOWNLOADED: set[str] = set()


class Unknown(Exception):  # noqa: N818 - the program is not at fault
    """No synthetic data is known for a download."""


def _rng(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


def _words(rng: np.random.Generator, count: int) -> str:
    return " ".join(_VOCABULARY[i] for i in rng.integers(0, len(_VOCABULARY), count))


_VOCABULARY = [a + b + c for a in "bdfgklmnprst" for b in "aeiou" for c in ("", "n", "r", "st")]


# Arrays of `keras.datasets`: rows to train, rows to test, shape of a row, classes.
_IMAGES = {
    "mnist": (60000, 10000, (28, 28), 10),
    "fashion_mnist": (60000, 10000, (28, 28), 10),
    "cifar10": (50000, 10000, (32, 32, 3), 10),
    "cifar100": (50000, 10000, (32, 32, 3), 100),
}
_TABLES = {"boston_housing": (404, 102, 13), "california_housing": (16512, 4128, 8)}
_TOKENS = {"imdb": (25000, 25000, 2), "reuters": (8982, 2246, 46)}


def _images(name: str, **_) -> tuple:
    train, test, shape, classes = _IMAGES[name]
    rng = _rng(name)
    column = () if name.startswith(("mnist", "fashion")) else (1,)

    def part(rows: int) -> tuple[np.ndarray, np.ndarray]:
        labels = rng.integers(0, classes, (rows, *column), dtype=np.uint8)
        # A part of the rows is random: the others repeat them, and are there for their number.
        return np.resize(
            rng.integers(0, 256, (512, *shape), dtype=np.uint8), (rows, *shape)
        ), labels

    return part(train), part(test)


def _tables(name: str, **_) -> tuple:
    train, test, columns = _TABLES[name]
    rng = _rng(name)
    return tuple(
        (rng.normal(size=(rows, columns)), rng.uniform(5, 50, size=rows)) for rows in (train, test)
    )


def _tokens(name: str, num_words: int | None = None, maxlen: int | None = None, **_) -> tuple:
    train, test, classes = _TOKENS[name]
    rng = _rng(name)

    def part(rows: int) -> tuple[np.ndarray, np.ndarray]:
        lengths = rng.integers(8, min(maxlen or 120, 120), 256)
        different = [[1, *rng.integers(4, num_words or 5000, n).tolist()] for n in lengths]
        texts = np.empty(rows, dtype=object)
        texts[:] = [different[i % len(different)] for i in range(rows)]
        return texts, rng.integers(0, classes, rows)

    return part(train), part(test)


def _word_index(*_, **__) -> dict[str, int]:
    return {word: i for i, word in enumerate(_VOCABULARY, 1)}


def _keras_datasets() -> Iterable[tuple[str, Callable, Callable]]:
    for names, make in ((_IMAGES, _images), (_TABLES, _tables), (_TOKENS, _tokens)):
        for name in names:
            module = importlib.import_module(f"keras.datasets.{name}")
            yield "load_data", module.load_data, functools.partial(make, name)
            if hasattr(module, "get_word_index"):
                yield "get_word_index", module.get_word_index, _word_index


# Rows of tables by the name of their file: a column is its values, or the bounds of numbers.
_NUMBER = (0.0, 1.0)
_COUNT = (0, 9)
_FRAMES: dict[str, Mapping[str, object]] = {
    "adult": {
        "age": (17, 90),
        "workclass": [" Private", " State-gov", " ?"],
        "fnlwgt": (10000, 90000),
        "education": [" Bachelors", " HS-grad", " Masters"],
        "education_num": (1, 16),
        "marital_status": [" Divorced", " Never-married"],
        "occupation": [" Sales", " Tech-support", " ?"],
        "relationship": [" Husband", " Wife", " Own-child"],
        "race": [" White", " Black", " Other"],
        "gender": [" Male", " Female"],
        "capital_gain": (0, 9999),
        "capital_loss": (0, 999),
        "hours_per_week": (1, 99),
        "native_country": [" United-States", " Mexico", " ?"],
        "income_bracket": [" <=50K", " >50K"],
    },
    "heart": {
        "age": (29, 77),
        "sex": (0, 1),
        "cp": (0, 4),
        "trestbps": (94, 200),
        "chol": (126, 564),
        "fbs": (0, 1),
        "restecg": (0, 2),
        "thalach": (71, 202),
        "exang": (0, 1),
        "oldpeak": (0.0, 6.2),
        "slope": (1, 3),
        "ca": (0, 3),
        "thal": ["fixed", "normal", "reversible"],
        "target": (0, 1),
    },
    "covtype": {str(i): _COUNT if i < 10 else (0, 1) for i in range(54)} | {"54": (1, 7)},
    "creditcard": {"Time": _NUMBER}
    | {f"V{i}": _NUMBER for i in range(1, 29)}
    | {"Amount": (0.0, 99.0), "Class": (0, 1)},
    "ratings": {
        "userId": (1, 60),
        "movieId": (1, 99),
        "rating": [1.0, 2.0, 3.0, 4.0, 5.0],
        "timestamp": (900000000, 1000000000),
    },
    "movies": {
        "movieId": range(1, 100),
        "title": [f"Film {i} (1999)" for i in range(1, 100)],
        "genres": ["Comedy|Drama", "Action", "Drama"],
    },
    "users": {
        "user_id": range(1, 61),
        "sex": ["F", "M"],
        "age_group": ["1", "18", "25"],
        "occupation": (0, 20),
        "zip_code": (10000, 99999),
    },
    "cora.cites": {"target": (1, 300), "source": (1, 300)},
    "cora.content": {"paper_id": range(1, 301)}
    | {f"term_{i}": (0, 1) for i in range(1433)}
    | {"subject": ["Theory", "Neural_Networks", "Rule_Learning"]},
    "jena_climate": {"Date Time": ["01.01.2009 00:10:00"]}
    | dict.fromkeys(
        [
            "p (mbar)",
            "T (degC)",
            "Tpot (K)",
            "Tdew (degC)",
            "rh (%)",
            "VPmax (mbar)",
            "VPact (mbar)",
            "VPdef (mbar)",
            "sh (g/kg)",
            "H2OC (mmol/mol)",
            "rho (g/m**3)",
            "wv (m/s)",
            "max. wv (m/s)",
            "wd (deg)",
        ],
        _NUMBER,
    ),
    "art_daily": {"value": (10.0, 90.0)},
}
_FRAME_ROWS = {"jena_climate": 20000, "art_daily": 4032, "movies": 99, "users": 60}
_FRAME_ROWS |= {"cora.content": 300, "ratings": 2000}


def _frame(name: str, rows: int):
    pandas = importlib.import_module("pandas")
    rng = _rng(name)
    columns = {key: _column(rng, values, rows) for key, values in _FRAMES[name].items()}
    return pandas.DataFrame(columns)


def _column(rng: np.random.Generator, values: object, rows: int) -> np.ndarray:
    if isinstance(values, range):
        return np.resize(np.array(values), rows)
    if isinstance(values, tuple):
        low, high = values
        if isinstance(low, int):
            return rng.integers(low, high, rows, endpoint=True)
        return rng.uniform(low, high, rows)
    return rng.choice(np.array(values), rows)


def _known_frame(path: str) -> str:
    base = Path(urllib.parse.urlparse(path).path).name.lower()
    for name in _FRAMES:
        if base.startswith(name):
            return name
    raise Unknown(f"no synthetic table for {base!r}")


def _reading_tables(read_csv: Callable) -> Callable:
    @functools.wraps(read_csv)
    def read(path, *args, **kwargs):
        if not isinstance(path, (str, Path)) or Path(path).exists():
            return read_csv(path, *args, **kwargs)
        name = _known_frame(str(path))
        frame = _frame(name, _FRAME_ROWS.get(name, ROWS))
        if kwargs.get("names") is not None:
            frame.columns = [*kwargs["names"]][: len(frame.columns)]
        elif "header" in kwargs and kwargs["header"] is None:
            frame.columns = range(len(frame.columns))
        if kwargs.get("parse_dates"):
            minutes = importlib.import_module("pandas").date_range(
                "2014-04-01", freq="5min", periods=len(frame)
            )
            frame.index = minutes.rename("timestamp")
        return frame

    return read


# Rows of numbers with a label of 1 or -1 in front, by the start of their file's name.
_SERIES = {"forda_train": (3601, 500), "forda_test": (1320, 500)}


def _reading_series(loadtxt: Callable) -> Callable:
    @functools.wraps(loadtxt)
    def read(path, *args, **kwargs):
        if not isinstance(path, (str, Path)) or Path(path).exists():
            return loadtxt(path, *args, **kwargs)
        base = Path(urllib.parse.urlparse(str(path)).path).stem.lower()
        if base not in _SERIES:
            raise Unknown(f"no synthetic series for {base!r}")
        rng = _rng(base)
        rows, columns = _SERIES[base]
        labels = rng.choice(np.array([-1.0, 1.0]), (rows, 1))
        return np.concatenate([labels, rng.normal(size=(rows, columns))], axis=1)

    return read


def open_file(path, mode="r", *args, **kwargs):
    """Open a file as `open` does; a missing table that is known here is written before."""
    if "r" in mode and isinstance(path, (str, Path)) and not Path(path).exists():
        name = _known_frame(str(path))
        path = Path.cwd() / f"{name}.csv"
        _frame(name, _FRAME_ROWS.get(name, ROWS)).to_csv(path, index=False)
    return open(path, mode, *args, **kwargs)


# Files.
def _write_image(path: Path) -> None:
    image = importlib.import_module("PIL.Image")
    pixels = _rng(path.name).integers(0, 256, (240, 320, 3), dtype=np.uint8)
    image.fromarray(pixels).save(path)


def _write_text(path: Path) -> None:
    rng = _rng(path.name)
    lines = [f"{_words(rng, 5).capitalize()}.\t{_words(rng, 5)}." for _ in range(2000)]
    path.write_text("\n".join(lines) + "\n")


def _write_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("README", "synthetic")


def _write_nothing(path: Path) -> None:
    path.write_bytes(b"")


_WRITERS: dict[str, Callable[[Path], None]] = {
    **dict.fromkeys((".jpg", ".jpeg", ".png"), _write_image),
    ".txt": _write_text,
    **dict.fromkeys((".zip", ".gz", ".tgz", ".tar"), _write_zip),
    **dict.fromkeys((".h5", ".keras", ".csv", ".data", ".weights"), _write_nothing),
}


def _fetch(origin: str, path: Path) -> str:
    """Write a synthetic file in place of a download."""
    suffix = path.suffix.lower() or Path(urllib.parse.urlparse(origin).path).suffix.lower()
    if suffix not in _WRITERS:
        raise Unknown(f"no synthetic file for {path.name!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    _WRITERS[suffix](path)
    _DOWNLOADED.add(str(path))
    return str(path)


def _get_file(fname=None, origin=None, *_, cache_dir=None, cache_subdir="datasets", **__) -> str:
    origin = origin or str(fname)
    base = Path(urllib.parse.urlparse(str(fname or origin)).path).name
    return _fetch(origin, Path(cache_dir or Path.home() / ".keras") / cache_subdir / base)


def _urlretrieve(url, filename=None, *_, **__):
    path = Path(filename or Path(urllib.parse.urlparse(url).path).name)
    return _fetch(url, path), None


def _no_network(url, *_, **__):
    raise Unknown(f"no synthetic answer for {getattr(url, 'full_url', url)}")


def _loading_weights(load_weights: Callable) -> Callable:
    @functools.wraps(load_weights)
    def load(self, filepath, *args, **kwargs):
        # Downloaded weights stay the random ones of the model.
        if str(filepath) not in _DOWNLOADED:
            return load_weights(self, filepath, *args, **kwargs)
        return None

    return load


# Folders of images and texts.
def _folder(reader: Callable, element: Callable) -> Callable:
    @functools.wraps(reader)
    def read(directory, *args, **kwargs):
        if Path(directory).exists() and any(p.is_dir() for p in Path(directory).iterdir()):
            return reader(directory, *args, **kwargs)
        return _folder_dataset(str(directory), element, kwargs)

    return read


def _folder_dataset(directory: str, element: Callable, options: Mapping):
    tf = importlib.import_module("tensorflow")
    rng = _rng(directory)
    mode = options.get("label_mode", "int")
    classes = len(options.get("class_names") or "ab")
    batch = options.get("batch_size", 32)
    rows = 64 if batch is None else 4 * min(batch, 16)
    data = tf.data.Dataset.from_tensor_slices(element(rng, rows, options))
    if mode is not None:
        labels = rng.integers(0, classes, rows)
        if mode == "categorical":
            labels = np.eye(classes, dtype=np.float32)[labels]
        elif mode == "binary":
            labels = labels[:, None].astype(np.float32)
        labels = labels.astype(np.int32) if mode == "int" else labels
        data = tf.data.Dataset.zip((data, tf.data.Dataset.from_tensor_slices(labels)))
    data = data if batch is None else data.batch(batch)
    data.class_names = options.get("class_names") or [chr(97 + i) for i in range(classes)]
    if options.get("subset") == "both":
        return data, data
    return data


def _folder_images(rng: np.random.Generator, rows: int, options: Mapping) -> np.ndarray:
    size = options.get("image_size", (256, 256))
    channels = {"grayscale": 1, "rgb": 3, "rgba": 4}[options.get("color_mode", "rgb")]
    return rng.uniform(0, 255, (rows, *size, channels)).astype(np.float32)


def _folder_texts(rng: np.random.Generator, rows: int, options: Mapping) -> list[str]:
    return [_words(rng, 30) for _ in range(rows)]


# TensorFlow Datasets.
def _image(*shape: int, classes: int = 10) -> Callable:
    def make(rng: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
        images = rng.integers(0, 256, (rows, *shape), dtype=np.uint8)
        return {"image": images, "label": rng.integers(0, classes, rows)}

    return make


def _text(classes: int = 2) -> Callable:
    def make(rng: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
        texts = np.array([_words(rng, 30) for _ in range(rows)])
        return {"text": texts, "label": rng.integers(0, classes, rows)}

    return make


def _wine(rng: np.random.Generator, rows: int) -> dict:
    names = [
        "fixed acidity",
        "volatile acidity",
        "citric acid",
        "residual sugar",
        "chlorides",
        "free sulfur dioxide",
        "total sulfur dioxide",
        "density",
        "pH",
        "sulphates",
        "alcohol",
    ]
    features = {name: rng.uniform(0, 10, rows).astype(np.float32) for name in names}
    return {"features": features, "quality": rng.integers(0, 10, rows)}


def _segmented(rng: np.random.Generator, rows: int) -> dict:
    return {
        "image": rng.integers(0, 256, (rows, 128, 128, 3), dtype=np.uint8),
        "label": rng.integers(0, 37, rows),
        "segmentation_mask": rng.integers(1, 4, (rows, 128, 128, 1), dtype=np.uint8),
    }


def _pairs_of_images(rng: np.random.Generator, rows: int) -> dict:
    return {
        "lr": rng.integers(0, 256, (rows, 128, 128, 3), dtype=np.uint8),
        "hr": rng.integers(0, 256, (rows, 512, 512, 3), dtype=np.uint8),
    }


def _ratings(rng: np.random.Generator, rows: int) -> dict:
    movies, users = rng.integers(1, 100, rows), rng.integers(1, 60, rows)
    return {
        "movie_id": movies.astype(str),
        "movie_title": np.array([f"Film {i} (1999)" for i in movies]),
        "user_id": users.astype(str),
        "user_rating": rng.integers(1, 6, rows).astype(np.float32),
        "timestamp": rng.integers(900000000, 1000000000, rows),
        "bucketized_user_age": rng.choice(np.array([18.0, 25.0, 35.0], np.float32), rows),
        "raw_user_age": rng.uniform(18, 60, rows).astype(np.float32),
        "user_gender": rng.integers(0, 2, rows).astype(bool),
        "user_occupation_text": rng.choice(np.array(["artist", "doctor"]), rows),
        "user_occupation_label": rng.integers(0, 20, rows),
        "user_zip_code": rng.integers(10000, 99999, rows).astype(str),
    }


def _films(rng: np.random.Generator, rows: int) -> dict:
    numbers = np.arange(1, 100)
    titles = np.array([f"Film {i} (1999)" for i in numbers])
    return {"movie_id": numbers.astype(str), "movie_title": titles, "movie_genres": numbers % 19}


_TFDS: dict[str, tuple[Callable, int]] = {
    "mnist": (_image(28, 28, 1), 10),
    "fashion_mnist": (_image(28, 28, 1), 10),
    "binarized_mnist": (_image(28, 28, 1), 10),
    "cifar10": (_image(32, 32, 3), 10),
    "cifar100": (_image(32, 32, 3, classes=100), 100),
    "svhn_cropped": (_image(32, 32, 3), 10),
    "omniglot": (_image(105, 105, 3, classes=100), 100),
    "cats_vs_dogs": (_image(160, 180, 3, classes=2), 2),
    "tf_flowers": (_image(160, 180, 3, classes=5), 5),
    "oxford_flowers102": (_image(160, 180, 3, classes=102), 102),
    "stanford_dogs": (_image(160, 180, 3, classes=120), 120),
    "stl10": (_image(96, 96, 3), 10),
    "caltech_birds2011": (_image(160, 180, 3, classes=200), 200),
    "imagenet2012": (_image(160, 180, 3, classes=1000), 1000),
    "oxford_iiit_pet": (_segmented, 37),
    "div2k": (_pairs_of_images, 0),
    "imdb_reviews": (_text(), 2),
    "ag_news_subset": (_text(4), 4),
    "wine_quality": (_wine, 10),
    "movielens/100k-ratings": (_ratings, 0),
    "movielens/100k-movies": (_films, 0),
    "movielens/1m-ratings": (_ratings, 0),
}
_SUPERVISED = {"wine_quality": ("features", "quality"), "div2k": ("lr", "hr")}
_TFDS_ROWS = {"train": 512, "test": 128, "validation": 128}


def _tfds_name(name: str) -> str:
    for known in (name, name.split(":")[0], name.split("/")[0], name.split("/")[0].split(":")[0]):
        if known in _TFDS:
            return known
    raise Unknown(f"no synthetic dataset for tfds {name!r}")


def _tfds_part(name: str, split: str, *, supervised: bool):
    tf = importlib.import_module("tensorflow")
    known = _tfds_name(name)
    rows = _TFDS_ROWS.get(str(split).split("[")[0], 128)
    data = _TFDS[known][0](_rng(f"{name} {split}"), rows)
    if supervised:
        first, second = _SUPERVISED.get(known, (next(iter(data)), "label"))
        data = (data[first], data[second])
    return tf.data.Dataset.from_tensor_slices(data).apply(
        tf.data.experimental.assert_cardinality(len(_leaf(data)))
    )


def _leaf(data) -> np.ndarray:
    while not isinstance(data, np.ndarray):
        data = next(iter(data.values())) if isinstance(data, dict) else data[0]
    return data


def _tfds_load(name, *, split=None, as_supervised=False, with_info=False, batch_size=None, **_):
    parts = split if isinstance(split, (list, tuple, dict)) or split else list(_TFDS_ROWS)

    def load(part: str):
        data = _tfds_part(name, str(part), supervised=as_supervised)
        if batch_size == -1:
            return data.batch(10**6).get_single_element()
        return data.batch(batch_size) if batch_size else data

    if split is None:
        loaded = {part: load(part) for part in parts}
    elif isinstance(parts, (list, tuple)):
        loaded = [load(part) for part in parts]
    else:
        loaded = load(parts)
    return (loaded, _info(name)) if with_info else loaded


def _info(name: str) -> types.SimpleNamespace:
    classes = _TFDS[_tfds_name(name)][1]
    label = types.SimpleNamespace(
        num_classes=classes,
        names=[str(i) for i in range(classes)],
        int2str=str,
    )
    splits = {part: types.SimpleNamespace(num_examples=rows) for part, rows in _TFDS_ROWS.items()}
    return types.SimpleNamespace(features={"label": label}, splits=splits)


def _as_numpy(dataset):
    if hasattr(dataset, "as_numpy_iterator"):
        return dataset.as_numpy_iterator()
    tf = importlib.import_module("tensorflow")
    return tf.nest.map_structure(lambda x: x.numpy(), dataset)


class _TfdsBuilder:
    def __init__(self, name, **_):
        self._name = name
        self.info = _info(name)

    def download_and_prepare(self, **_):
        pass

    def as_dataset(self, split=None, *, as_supervised=False, **_):
        return _tfds_load(self._name, split=split, as_supervised=as_supervised)


# Hugging Face datasets.
class _Rows:
    """The part of `datasets.Dataset` that programs use to read rows."""

    def __init__(self, columns: Mapping[str, list]):
        self._columns = dict(columns)

    def __len__(self):
        return len(next(iter(self._columns.values())))

    def __getitem__(self, key):
        if isinstance(key, str):
            return self._columns[key]
        if isinstance(key, (int, np.integer)):
            return {name: values[key] for name, values in self._columns.items()}
        rows = range(len(self))[key] if isinstance(key, slice) else key
        return {name: [values[i] for i in rows] for name, values in self._columns.items()}

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def select(self, rows):
        return _Rows(self[[*rows]])

    def shuffle(self, seed=0, **_):
        return self.select(np.random.default_rng(seed).permutation(len(self)).tolist())

    def with_format(self, *_, **__):
        return _Rows({name: np.array(values) for name, values in self._columns.items()})


def _load_dataset(name, *_, split=None, **__):
    known = _tfds_name(str(name).rsplit("/", maxsplit=1)[-1])

    def part(which: str) -> _Rows:
        data = _TFDS[known][0](_rng(f"{name} {which}"), _TFDS_ROWS[which])
        squeezed = {
            key: [row.squeeze() if getattr(row, "ndim", 0) == 3 else row for row in values]
            for key, values in data.items()
        }
        return _Rows(squeezed)

    if split is not None:
        return part(str(split).split("[")[0])
    return {which: part(which) for which in ("train", "test")}


# Torch's vision datasets, for programs of JAX that load their rows with them.
class _TorchImages:
    def __init__(self, name, root=None, train=True, transform=None, **_):
        train_rows = _IMAGES[name]
        self._images = _rng(name).integers(0, 256, (256, *train_rows[2]), dtype=np.uint8)
        self._labels = _rng(name).integers(0, train_rows[3], 256)
        self._transform = transform

    def __len__(self):
        return len(self._images)

    def __getitem__(self, i):
        if i >= len(self):
            raise IndexError(i)
        image = self._images[i]
        return (self._transform(image) if self._transform else image), int(self._labels[i])


def _to_tensor():
    torch = importlib.import_module("torch")

    def convert(image):
        image = np.asarray(image)
        image = image[..., None] if image.ndim == 2 else image
        return torch.from_numpy(image.transpose(2, 0, 1).astype(np.float32) / 255)

    return convert


def _normalize(mean, std, **_):
    torch = importlib.import_module("torch")
    mean, std = (torch.tensor(x).reshape(-1, 1, 1) for x in (mean, std))
    return lambda image: (image - mean) / std


def _compose(transforms):
    return lambda image: functools.reduce(lambda x, f: f(x), transforms, image)


def _unchanged(*_, **__):
    return lambda image: image


def _module(name: str, **attributes) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(attributes)
    return module


def _register(module: types.ModuleType, **submodules: types.ModuleType) -> None:
    sys.modules[module.__name__] = module
    for name, submodule in submodules.items():
        setattr(module, name, submodule)
        sys.modules[submodule.__name__] = submodule


def _stand_in_modules() -> None:
    tfds = _module(
        "tensorflow_datasets",
        load=_tfds_load,
        builder=_TfdsBuilder,
        as_numpy=_as_numpy,
        disable_progress_bar=lambda: None,
    )
    _register(tfds)
    _register(_module("datasets", load_dataset=_load_dataset))
    datasets = {
        real: functools.partial(_TorchImages, name)
        for real, name in (
            *(("MNIST", "mnist"), ("FashionMNIST", "fashion_mnist")),
            *(("CIFAR10", "cifar10"), ("CIFAR100", "cifar100")),
        )
    }
    transforms = _module(
        "torchvision.transforms",
        Compose=_compose,
        ToTensor=_to_tensor,
        Normalize=_normalize,
        **dict.fromkeys(("Resize", "RandomHorizontalFlip", "RandomCrop", "CenterCrop"), _unchanged),
    )
    _register(
        _module("torchvision"),
        datasets=_module("torchvision.datasets", **datasets),
        transforms=transforms,
    )
    _stand_in_for_display()


class _Anything:
    """An object of a library that only shows things."""

    def __init__(self, *_, **__):
        pass

    def __class_getitem__(cls, _):
        return cls

    def __call__(self, *_, **__):
        return self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self


def _stand_in_for_display() -> None:
    """Replace libraries that show results to a person, where they are not installed."""
    for name in ("IPython", "tensorboardX", "treescope"):
        if importlib.util.find_spec(name) is None:
            display = _module(f"{name}.display", __getattr__=lambda _: _Anything)
            # Matplotlib asks IPython whether it runs.
            shell = {"version_info": (9, 0, 0), "get_ipython": lambda: None}
            _register(_module(name, __getattr__=lambda _: _Anything, **shell), display=display)


def _replace_everywhere(original: object, replacement: object) -> None:
    """Replace a function in all modules of Keras that have it by name."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("keras", "tensorflow") and module is not None:
            for key, value in list(vars(module).items()):
                if value is original:
                    setattr(module, key, replacement)


def install(library: str) -> None:
    """Replace downloads in this process."""
    _stand_in_modules()
    request = importlib.import_module("urllib.request")
    request.urlretrieve, request.urlopen = _urlretrieve, _no_network
    np.loadtxt = _reading_series(np.loadtxt)
    if importlib.util.find_spec("requests") is not None:
        importlib.import_module("requests").get = _no_network
    if importlib.util.find_spec("pandas") is not None:
        pandas = importlib.import_module("pandas")
        pandas.read_csv = _reading_tables(pandas.read_csv)
    if library == "keras":
        _install_keras()


def _install_keras() -> None:
    keras = importlib.import_module("keras")
    if importlib.util.find_spec("tensorflow") is not None:
        importlib.import_module("keras._tf_keras.keras")
    for _, original, replacement in list(_keras_datasets()):
        _replace_everywhere(original, replacement)
    utils = keras.utils
    _replace_everywhere(utils.get_file, _get_file)
    for reader, element in (
        (utils.image_dataset_from_directory, _folder_images),
        (utils.text_dataset_from_directory, _folder_texts),
    ):
        _replace_everywhere(reader, _folder(reader, element))
    _replace_everywhere(utils.plot_model, lambda *_, **__: None)
    keras.Model.load_weights = _loading_weights(keras.Model.load_weights)
