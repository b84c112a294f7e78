"""GGUF import: codes bit for bit, values exactly those of the gguf package, damage refused."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qoff.errors import FormatError
from qoff.quant import GGUFFile, QTensor

HALVES = {"Q4_0": 1, "Q4_1": 2, "Q8_0": 1}  # fp16 numbers at the head of a block
CODE_BYTES = {"Q4_0": 16, "Q4_1": 16, "Q8_0": 32}
in_one_folder = settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def _write(path, tensors, metadata=()):
    """Write a GGUF file of {name: (array, type)}, arrays of quantized types as raw bytes."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in metadata:
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_string(name, value)
    for name, (array, kind) in tensors.items():
        raw = None if array.dtype in (np.float32, np.float16) else kind
        writer.add_tensor(name, array, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _blocks(kind, n, blocks, heads, seed=0):
    """Random blocks uint8 [n, bytes] whose fp16 heads are drawn from `heads`."""
    random = np.random.default_rng(seed)
    head = random.choice(np.asarray(heads, np.float16), (n, blocks, HALVES[kind]))
    codes = random.integers(0, 256, (n, blocks, CODE_BYTES[kind]), np.uint8)
    return np.concatenate((head.view(np.uint8), codes), axis=2).reshape(n, -1)


@in_one_folder
@given(
    kind=st.sampled_from(list(HALVES)),
    n=st.integers(1, 20),
    blocks=st.integers(1, 5),
    heads=st.lists(st.floats(-65504, 65504, width=16), min_size=1, max_size=20),
    seed=st.integers(0, 2**31),
)
def test_codes_and_values_are_exactly_those_of_the_file(tmp_path, kind, n, blocks, heads, seed):
    raw = _blocks(kind, n, blocks, heads, seed)
    file = GGUFFile(_write(tmp_path / "m.gguf", {"w": (raw, Type[kind])}))
    q = file.load("w")
    assert isinstance(q, QTensor)
    assert q.shape == file.shape("w") == (n, 32 * blocks)
    assert (q.bits, q.group_size, q.packing) == (8 if kind == "Q8_0" else 4, 32, "split32")
    stored = raw.reshape(n, blocks, -1)[:, :, -CODE_BYTES[kind] :].reshape(n, -1)
    assert np.array_equal(q.codes.numpy(), stored ^ (128 if kind == "Q8_0" else 0))
    expected = gguf.quants.dequantize(raw, Type[kind])
    assert expected.dtype == np.float32
    assert np.array_equal(q.dequantize().numpy(), expected)


@pytest.mark.parametrize("kind", list(HALVES))
def test_values_the_gguf_package_quantized_come_back(tmp_path, kind):
    w = np.random.default_rng(0).standard_normal((48, 96), np.float32)
    raw = gguf.quants.quantize(w, Type[kind])
    q = GGUFFile(_write(tmp_path / "m.gguf", {"w": (raw, Type[kind])})).load("w")
    assert np.array_equal(q.dequantize().numpy(), gguf.quants.dequantize(raw, Type[kind]))
    assert q.scale_min.dtype == torch.float16


def test_scales_are_float32_only_where_float16_cannot_hold_the_minimum(tmp_path):
    for kind, largest in {"Q4_0": 8188, "Q8_0": 511.75}.items():
        for head, dtype in ((largest, torch.float16), (largest * 1.01, torch.float32)):
            raw = _blocks(kind, 3, 2, [head])
            file = GGUFFile(_write(tmp_path / "m.gguf", {"w": (raw, Type[kind])}))
            assert file.load("w").scale_min.dtype == dtype


def test_dense_tensors_and_metadata_are_read_as_they_are(tmp_path):
    random = np.random.default_rng(0)
    wide = random.standard_normal((5, 7), np.float32)
    narrow = random.standard_normal(9).astype(np.float16)
    brain = torch.randn(4, 32).bfloat16()
    tensors = {
        "wide": (wide, Type.F32),
        "narrow": (narrow, Type.F16),
        "brain": (brain.view(torch.int16).numpy().view(np.uint8), Type.BF16),
    }
    metadata = [("a.words", ["one", "zwei", "三"]), ("a.numbers", [1, 2, 3]), ("a.name", "x")]
    file = GGUFFile(_write(tmp_path / "m.gguf", tensors, metadata))
    assert file.tensors == ("wide", "narrow", "brain")
    assert [file.tensor_type(name) for name in file.tensors] == ["F32", "F16", "BF16"]
    expected = {"wide": torch.from_numpy(wide), "narrow": torch.from_numpy(narrow), "brain": brain}
    for name, want in expected.items():
        got = file.load(name)
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
    found = {k: v for k, v in file.metadata.items() if k.startswith("a.")}
    assert found.pop("a.numbers").tolist() == [1, 2, 3]
    assert found == {"a.words": ["one", "zwei", "三"], "a.name": "x"}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The bytes of a small good file, and how many of them it needs."""
    tensors = {
        "q": (_blocks("Q4_1", 4, 2, [0.5, -1.0]), Type.Q4_1),
        "norm": (np.ones(16, np.float32), Type.F32),
        "e": (_blocks("Q8_0", 4, 2, [0.25]), Type.Q8_0),
    }
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    _write(path, tensors, [("words", ["a", "b", "c"]), ("numbers", [1, 2, 3])])
    needed = max(t.data_offset + t.n_bytes for t in gguf.GGUFReader(path).tensors)
    return path.read_bytes(), needed


@in_one_folder
@given(data=st.data())
def test_a_file_cut_anywhere_is_refused_by_name(tmp_path, small, data):
    content, needed = small
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[: data.draw(st.integers(0, needed - 1))])
    with pytest.raises(FormatError, match=r"cut\.gguf: cannot be read as GGUF"):
        GGUFFile(path)


@settings(in_one_folder, max_examples=300)
@given(data=st.data())
def test_changed_bytes_give_a_format_error_or_a_readable_file(tmp_path, small, data):
    content, _ = small
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 2))):
        changed[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "changed.gguf"
    path.write_bytes(changed)
    loaded = _load_all(path)
    if isinstance(loaded, FormatError):
        assert str(path) in str(loaded)
    else:
        values = [w.scale_min if isinstance(w, QTensor) else w for w in loaded]
        assert all(bool(torch.isfinite(w).all()) for w in values)


def _load_all(path):
    """Return all tensors of a file, or the error that reading it gives."""
    try:
        file = GGUFFile(path)
        return [file.load(name) for name in file.tensors]
    except FormatError as error:
        return error


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "empty"), (b"\x93NUMPY" + bytes(100), "magic"), (b"GGUF\x63" + bytes(100), "version")],
)
def test_other_files_are_refused(tmp_path, content, message):
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=rf"other\.gguf: .*{message}.* get it again"):
        GGUFFile(path)


def test_a_missing_file_and_a_missing_tensor_are_named(tmp_path, small):
    with pytest.raises(FormatError, match=r"none\.gguf: no such file"):
        GGUFFile(tmp_path / "none.gguf")
    path = tmp_path / "small.gguf"
    path.write_bytes(small[0])
    with pytest.raises(FormatError, match=r"small\.gguf: no tensor 'k' among its 3"):
        GGUFFile(path).load("k")


def test_unsupported_types_are_named_with_the_supported_ones(tmp_path):
    raw = np.zeros((2, 292), np.uint8)
    file = GGUFFile(_write(tmp_path / "k.gguf", {"blk.w": (raw, Type.Q8_K)}))
    assert file.tensor_type("blk.w") == "Q8_K"
    with pytest.raises(FormatError, match=r"k\.gguf: tensor blk\.w has type Q8_K.*Q4_0, Q4_1"):
        file.load("blk.w")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_numbers_are_refused_by_name(tmp_path, bad):
    tensors = {
        "q": (_blocks("Q4_0", 2, 2, [1.0, bad]), Type.Q4_0),
        "f": (np.asarray([1.0, bad], np.float32), Type.F32),
    }
    file = GGUFFile(_write(tmp_path / "m.gguf", tensors))
    for name in tensors:
        with pytest.raises(FormatError, match=rf"m\.gguf: tensor {name} .* NaN or infinity"):
            file.load(name)
