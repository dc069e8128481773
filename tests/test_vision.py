"""Image classifiers: data as it comes, training by recipe in both libraries, conversion, and judging by a command."""

import json
import tarfile
from pathlib import Path

import numpy
import pytest
import torch
import transformers
from PIL import Image
from typer.testing import CliRunner

import collab
import collab.sources
from collab import classification
from collab.classification import Preparation, accuracy, outputs_for
from collab.commands import app
from collab.evaluate_commands import _find
from collab.hosts import Collaborative
from collab.recipes import train, vision, vision_models
from collab.recipes.augmentation import Augmentation, Mixing, repeated_batches, soft_loss, timm_pipeline
from collab.recipes.device_augmentation import OPERATIONS, DeviceAugmentation, crop_boxes, erased
from collab.recipes.image_cache import cached_images
from collab.recipes.images import each_class_in_turn, find_images, read_image
from collab.recipes.settings import read_config
from collab.recipes.vision_conversion import rows_of
from collab.recipes.vision_data import TrainingImages
from tiny_models import randomise_

timm = pytest.importorskip("timm")
from timm.data.auto_augment import AugmentOp  # noqa: E402

SIDE, CLASSES = 16, ("n01", "n02", "n03")
COLOURS = ((200, 40, 40), (40, 200, 40), (40, 40, 200))


def picture(label, seed, side=SIDE):
    """An image whose colour tells its class."""
    noise = numpy.random.default_rng(seed).integers(-40, 40, (side, side, 3))
    return Image.fromarray((numpy.array(COLOURS[label]) + noise).clip(0, 255).astype(numpy.uint8))


def write(folder: Path, train_images=8, val_images=4, side=SIDE):
    """A folder as Tiny-ImageNet's."""
    lines = []
    for label, name in enumerate(CLASSES):
        (folder / "train" / name / "images").mkdir(parents=True)
        (folder / "val" / "images").mkdir(parents=True, exist_ok=True)
        for number in range(train_images):
            picture(label, 10 * label + number, side).save(folder / f"train/{name}/images/{name}_{number}.png")
        for number in range(val_images):
            file = f"val_{label}_{number}.png"
            picture(label, 1000 + 10 * label + number, side).save(folder / "val/images" / file)
            lines.append(f"{file}\t{name}\t0\t0\t62\t62\n")
    (folder / "val/val_annotations.txt").write_text("".join(reversed(lines)))
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write(tmp_path_factory.mktemp("images"))


TINY = {
    "depth": 2, "width": 24, "heads": 4, "image_size": SIDE, "patch_size": 8, "batch_size": 8, "epochs": 1.0,
    "warmup_epochs": 0.5, "workers": 0, "log_every": 1, "device": "cpu", "checkpoint_epochs": 0,
    "stochastic_depth": 0.1,
}  # fmt: skip


TURNED = {"turned": CLASSES[::-1], "few": CLASSES[:2]}
"""Classes of models that have them in another order than their names', or do not have them all."""


def settings(folder, **changes):
    return vision.Config(**{**TINY, "data": (str(folder),), **changes})


# Data.


@pytest.mark.parametrize("kept", [0, 2**29])
def test_layouts_give_the_same_images_unpacked_and_in_archives(kept, data, tmp_path, monkeypatch):
    monkeypatch.setattr("collab.recipes.images._KEPT", kept)  # larger archives are unpacked twice
    archives = []
    for split in ("train", "val"):
        archives.append(str(tmp_path / f"{split}.tar.xz"))
        with tarfile.open(archives[-1], "w:xz") as written:
            written.add(data / split, f"tiny/{split}")
    for split, count in (("train", 24), ("val", 12)):
        folder, packed = find_images([str(data)], split), find_images(archives, split)
        assert (folder.names, folder.labels, folder.classes) == (packed.names, packed.labels, packed.classes)
        assert len(folder) == count
        assert folder.classes == CLASSES
        assert dict(folder.stream()) == dict(packed.stream())
        some = packed.spread(4)
        assert dict(some.stream()) == dict(folder.spread(4).stream())
    assert _find([str(tmp_path)], None).names == packed.names  # a folder of archives is no folder of classes
    val = find_images([str(data)], "val")
    assert [int(name.split("_")[1]) for name in val.names] == list(val.labels)
    plain = _find([str(data / "train")], None)
    assert len(plain) == 24
    assert plain.classes == CLASSES


def test_images_are_taken_from_each_class_alike(data):
    some = find_images([str(data)], "train").spread(7)
    assert [some.labels.count(label) for label in range(3)] == [3, 2, 2]
    assert each_class_in_turn([0, 0, 1, 2, 2]) == [0, 2, 3, 1, 4]
    assert sorted(dict(some.stream())) == list(range(7))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: [str(folder / "nowhere")], "there is no .*nowhere"),
        (lambda folder: [str(folder)], "must hold a folder train or training with images, it holds nothing"),
        (lambda folder: (folder / "train").mkdir() or [str(folder)], "must hold images .*, got none"),
        (lambda folder: [], "data must name a folder, archives, or datasets:NAME, got nothing"),
        (lambda folder: [str((folder / "a.tar").write_bytes(b"no") and folder / "a.tar")], "must be a tar file"),
    ],
)
def test_what_holds_no_images_is_refused_by_name(make, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        find_images(make(tmp_path), "train")


def test_images_without_a_class_are_refused(tmp_path):
    (tmp_path / "val" / "images").mkdir(parents=True)
    picture(0, 0).save(tmp_path / "val/images/a.png")
    with pytest.raises(ValueError, match=r"must be in a folder of its class's name.*such as images/a.png"):
        find_images([str(tmp_path)], "val")


def test_data_sets_of_the_hub_are_read_and_judged_on(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    features = datasets.Features({"img": datasets.Image(), "fine": datasets.ClassLabel(names=list(CLASSES))})

    def part(labels):
        rows = {"img": [picture(max(label, 0), place) for place, label in enumerate(labels)], "fine": labels}
        return datasets.Dataset.from_dict(rows, features=features)

    made = {"train": part([0, 1, 2, 0]), "validation": part([1, 2])}
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name: {"some/set": made, "bare": {"train": made["train"]}}[name]
    )
    found = find_images(["datasets:some/set"], "val")
    assert (found.labels, found.classes, len(found)) == ((1, 2), CLASSES, 2)
    cached = cached_images(["datasets:some/set"], "train", tmp_path, size=SIDE)
    assert torch.equal(cached.pixels[3], torch.from_numpy(numpy.array(picture(0, 3))))
    assert (
        json.loads(run("evaluate", "vision", save_vit(tmp_path), "datasets:some/set", "--json").stdout)["images"] == 2
    )
    with pytest.raises(ValueError, match=r"must have a split val or valid or validation or test, it has train"):
        find_images(["datasets:bare"], "val")
    with pytest.raises(ValueError, match="one data set of the hub and nothing else"):
        find_images(["datasets:bare", "more"], "val")
    made["validation"] = part([1, -1])
    with pytest.raises(ValueError, match=r"datasets:some/set validation must have a class, 1 have none"):
        find_images(["datasets:some/set"], "val")


def test_grey_cmyk_and_transparent_images_become_colours(tmp_path):
    grey = picture(0, 0).convert("L")
    grey.save(tmp_path / "grey.jpg")
    picture(1, 0).convert("CMYK").save(tmp_path / "cmyk.jpg")
    picture(2, 0).convert("RGBA").save(tmp_path / "clear.png")
    picture(2, 0).convert("P").save(tmp_path / "palette.gif")
    for name, label in (("grey.jpg", None), ("cmyk.jpg", 1), ("clear.png", 2), ("palette.gif", 2)):
        pixels = numpy.asarray(read_image((tmp_path / name).read_bytes())).reshape(-1, 3).mean(0)
        assert pixels.shape == (3,)
        assert numpy.ptp(pixels) < 1 if label is None else pixels.argmax() == label


def test_broken_images_are_named_and_left_out_or_refused(tmp_path):
    folder = write(tmp_path / "data", train_images=3, val_images=1)
    broken = folder / "train/n02/images/n02_1.png"
    broken.write_bytes(broken.read_bytes()[:60])
    with pytest.warns(UserWarning, match=r"left out 1 images that cannot be read: n02/images/n02_1.png"):
        found = cached_images([str(folder)], "train", tmp_path / "cache", size=SIDE)
    assert len(found) == 8
    assert found.labels.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert torch.equal(found.pixels[3], torch.from_numpy(numpy.array(picture(1, 10))))
    assert torch.equal(found.pixels[4], torch.from_numpy(numpy.array(picture(1, 12))))
    with pytest.raises(ValueError, match=r"cannot: n02/images/n02_1.png"):  # from the cache, too
        cached_images([str(folder)], "train", tmp_path / "cache", size=SIDE, refuse_broken=True)
    files = find_images([str(folder)], "train")
    examples = TrainingImages(files, Augmentation(image_size=8), "cpu", resident=False)
    with pytest.warns(UserWarning, match=r"passed over n02/images/n02_1.png"):
        assert examples[4][1] == 1
    strict = TrainingImages(files, Augmentation(image_size=8), "cpu", resident=False, refuse_broken=True)
    with pytest.raises(ValueError, match=r"n02/images/n02_1.png must be an image that can be read"):
        strict[4]
    model = save_vit(tmp_path)
    said = run("evaluate", "vision", model, folder, "--split", "train")
    assert "left out 1 images that cannot be read: n02/images/n02_1.png" in said.stdout
    assert (
        "every image must be one that can be read"
        in run("evaluate", "vision", model, folder, "--split", "train", "--refuse-broken", code=2).stderr
    )


def test_the_cache_is_filled_once_and_large_images_are_cut_to_their_middle(data, tmp_path, monkeypatch):
    first = cached_images([str(data)], "val", tmp_path, size=8, limit=6)
    monkeypatch.setattr("collab.recipes.image_cache.find_images", None)
    again = cached_images([str(data)], "val", tmp_path, size=8, limit=6)
    assert first.pixels.shape == (6, 8, 8, 3)
    assert torch.equal(first.pixels, again.pixels)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [next(tmp_path.glob("val-8-*-6")).name]
    wide = Image.new("RGB", (40, 20), (9, 9, 9))
    wide.paste((200, 0, 0), (10, 0, 30, 20))
    from collab.recipes.image_cache import squared

    assert squared(wide, 20)[:, 1:-1].tolist() == [[[200, 0, 0]] * 18] * 20


# Augmentation.


def level(name, amount):
    """timm's operation at a level, without chance."""
    operation = AugmentOp(name, prob=1.0, magnitude=amount, hparams={"img_mean": (124, 116, 104), "interpolation": 2})
    return operation


@pytest.mark.parametrize(
    ("own", "name", "tolerance"),
    [
        ("autocontrast", "AutoContrast", 1.01), ("equalize", "Equalize", 1.01), ("invert", "Invert", 0),
        ("posterize", "PosterizeIncreasing", 0), ("solarize", "SolarizeIncreasing", 0),
        ("solarize_add", "SolarizeAdd", 0), ("color", "ColorIncreasing", 2.01),
        ("contrast", "ContrastIncreasing", 2.01), ("brightness", "BrightnessIncreasing", 1.01),
        ("sharpness", "SharpnessIncreasing", 2.01), ("rotate", "Rotate", 3), ("shear_x", "ShearX", 3),
        ("shear_y", "ShearY", 3), ("translate_x", "TranslateXRel", 3), ("translate_y", "TranslateYRel", 3),
    ],
)  # fmt: skip
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_operations_on_the_device_are_timms(own, name, tolerance, sign, monkeypatch):
    side = 32
    down, across = numpy.mgrid[:side, :side]
    smooth = numpy.stack((40 + 5 * down, 30 + 4 * across + down, 150 - 3 * down + across), axis=-1)
    if tolerance < 3:
        smooth[::3, ::2] += 30
    smooth = smooth.astype(numpy.uint8)
    monkeypatch.setattr("timm.data.auto_augment.random.random", lambda: 1.0 if sign < 0 else 0.0)
    expected = numpy.asarray(level(name, 7)(Image.fromarray(smooth))).astype(float)
    given = torch.from_numpy(smooth).permute(2, 0, 1)[None].float()
    fill = torch.tensor([124.0, 116.0, 104.0])[:, None, None]
    found = OPERATIONS[own](given, torch.tensor([7.0]), torch.tensor([sign]), fill).clamp(0, 255).round()
    difference = abs(found[0].permute(1, 2, 0).numpy() - expected)
    # Where an image ends, PIL and sampling from a grid cut differently.
    assert numpy.quantile(difference, 0.85 if tolerance == 3 else 1.0) <= tolerance
    assert abs(expected - smooth).max() > 5


def test_device_augmentation_varies_each_image_and_follows_torchs_random_numbers():
    pixels = torch.from_numpy(numpy.stack([numpy.array(picture(0, 1))] * 6))
    augment = DeviceAugmentation(Augmentation(image_size=12))
    torch.manual_seed(3)
    first = augment(pixels)
    torch.manual_seed(3)
    assert torch.equal(augment(pixels), first)
    assert first.shape == (6, 3, 12, 12)
    assert len({one.sum().item() for one in first}) == 6
    nothing = Augmentation(
        image_size=SIDE, crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0), flip=0, magnitude=0, erasing=0
    )
    colours = DeviceAugmentation(nothing)(pixels) * torch.tensor(nothing.deviation)[:, None, None]
    colours = (colours + torch.tensor(nothing.mean)[:, None, None]) * 255
    torch.testing.assert_close(colours, pixels.permute(0, 3, 1, 2).float(), atol=1e-3, rtol=0)
    boxes = crop_boxes(500, 20, 30, (0.08, 1.0), (3 / 4, 4 / 3))
    top, left, rows, columns = boxes.T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + rows <= 20).all()
    assert (left + columns <= 30).all()
    assert 0.25 < (rows * columns / 600).mean() < 0.5  # of shares from 0.08 up, few of the large ones fit
    share = (erased(torch.zeros(2000, 3, 8, 8), 0.25).abs().sum((1, 2, 3)) > 0).float().mean()
    assert 0.2 < share < 0.3


def test_timms_pipeline_takes_the_highest_level_too():
    pipeline = timm_pipeline(Augmentation(image_size=8, erasing=0))
    (randaugment,) = [step for step in pipeline.transforms if hasattr(step, "ops")]
    (operation,) = [one for one in randaugment.ops if one.name == "PosterizeIncreasing"]
    assert not numpy.asarray(operation.aug_fn(picture(0, 0), 0)).any()
    assert (numpy.asarray(operation.aug_fn(picture(0, 0), 2)) % 64 == 0).all()


def test_mixing_gives_soft_targets_and_leaves_numpys_random_numbers_alone():
    mixing = Mixing(Augmentation(), 3)
    pixels, labels = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 0])
    before = numpy.random.get_state()[1].copy()
    _, targets = mixing(pixels.clone(), labels)
    assert (numpy.random.get_state()[1] == before).all()
    torch.testing.assert_close(targets.sum(1), torch.ones(4))
    plain, targets = Mixing(Augmentation(mixup=0, cutmix=0, smoothing=0.3), 3)(pixels, labels)
    assert plain is pixels
    assert targets[0].tolist() == pytest.approx([0.8, 0.1, 0.1])
    with pytest.raises(ValueError, match="even number of images"):
        mixing(pixels[:3], labels[:3])


def test_the_loss_of_a_step_is_the_same_in_one_part_and_in_two():
    pixels, targets = torch.randn(6, 3), torch.rand(6, 3).softmax(-1)
    loss, model = soft_loss(), torch.nn.Identity()
    whole = loss(model, {"pixel_values": pixels, "targets": targets}, 6)
    parts = [loss(model, {"pixel_values": pixels[own], "targets": targets[own]}, 6) for own in ([0, 1], [2, 3, 4, 5])]
    torch.testing.assert_close(sum(parts), whole)
    torch.testing.assert_close(whole, torch.nn.functional.cross_entropy(pixels, targets))


def test_repeated_batches_hold_copies_and_follow_from_the_epoch():
    batches = repeated_batches(24, 8, 3, seed=0)
    first = batches(0)
    assert [len(batch) for batch in first] == [8, 8, 8]
    places = [place for batch in first for place in batch]
    assert len(set(places)) == 8  # a third of the images, thrice
    assert batches(0) == first != batches(1)
    assert repeated_batches(24, 8, 3, seed=1)(0) != first
    once = repeated_batches(24, 8, 1, seed=0)(0)
    assert sorted(place for batch in once for place in batch) == list(range(24))


# Models.


@pytest.mark.parametrize("library", vision_models.LIBRARIES)
def test_concatenated_heads_of_full_size_are_the_ordinary_model_exactly(library):
    """What our fresh layers compute with frozen blocks of ones, given the ordinary model's weights, is the same."""
    sizes = {"library": library, "depth": 2, "width": 24, "heads": 4, "image_size": SIDE, "patch_size": 8}
    plain = vision_models.build(vision_models.Architecture(**sizes), CLASSES).eval()
    assert not any(isinstance(module, Collaborative) for module in plain.modules())
    randomise_(plain)
    shared = vision_models.build(vision_models.Architecture(**sizes, attention="collaborative"), CLASSES).eval()
    state = shared.state_dict()
    ordinary = plain.state_dict()
    for name, value in ordinary.items():
        if name in state and state[name].shape == value.shape:
            state[name] = value
    shared.load_state_dict(state)
    for site, own in zip(collab.find_attention(plain), collab.find_attention(shared), strict=True):
        weights = site.host.read(site.module)
        copied = own.host.shared_weights(own.module)
        assert copied.mixing.sum(1).tolist() == [6.0] * 4  # blocks of ones
        copied.query.copy_(weights.query.flatten(0, 1))
        copied.key.copy_(weights.key.flatten(0, 1))
        copied.content.copy_(torch.einsum("hdk,hd->hk", weights.key, weights.query_bias))
        parameters = dict(own.module.named_parameters())
        for name, value in own.host.parameters_from(own.module, copied).items():
            parameters[name].data.copy_(value)
        if library == "timm":  # values are in the last third of one projection
            own.module.qkv.weight.data[-24:] = site.module.qkv.weight[-24:]
            own.module.qkv.bias.data.zero_()
            own.module.qkv.bias.data[-24:] = site.module.qkv.bias[-24:]
    pixels = torch.randn(2, 3, SIDE, SIDE)
    outputs = [model(pixels) for model in (plain, shared)]
    expected, found = (out if isinstance(out, torch.Tensor) else out.logits for out in outputs)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("library", vision_models.LIBRARIES)
def test_reduced_heads_train_everything_but_their_mixing(library):
    sizes = {"library": library, "depth": 1, "width": 24, "heads": 4, "image_size": SIDE, "patch_size": 8}
    counts = {}
    for attention in vision_models.ATTENTION:
        architecture = vision_models.Architecture(**sizes, attention=attention, key_dim=12)
        model = vision_models.build(architecture, CLASSES)
        (layer,) = [module for module in model.modules() if isinstance(module, Collaborative)]
        assert layer.shared_dim == 12
        assert layer.mixing.requires_grad == (attention == "collaborative")
        (site,) = collab.find_attention(model)
        own = site.host.shared_weights(layer)
        if attention == "concatenate":  # heads of 3 dimensions have the scale of 3, in layers that have that of 6
            torch.testing.assert_close(own.mixing, torch.full((4, 3), 2**0.5))
            assert own.dims.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
        spread = own.query.std()
        assert 0.015 < spread < 0.02  # as the model's own, cut at twice the deviation
        counts[attention] = vision.trained_parameters(model)
    assert layer.mixing.shape == (4, 12)
    assert counts["collaborative"] - counts["concatenate"] == 4 * 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"library": "jax"}, "library must be one of timm, transformers, got 'jax'"),
        ({"library": "transformers"}, "stochastic_depth must be 0 with library transformers"),
        ({"batch_size": 7}, "batch_size must be a multiple of 2"),
        ({"epochs": 0}, "epochs must be more than 0 for a model that is not pretrained"),
        ({"attention": "shared"}, "attention must be one of concatenate, collaborative"),
        ({"crop_scale": (0.5, 0.2)}, "crop_scale must be two shares"),
        ({"magnitude": 11}, "magnitude must be from 0 to 10"),
        ({"convert_methods": ("best",)}, "convert_methods must be one of paper"),
        ({"pretrained": True, "key_dim": 12}, "pretrained must be false where heads start afresh"),
        ({"data": ()}, "data must name a folder"),
        ({"convert_sizes": (12, 0)}, "convert_sizes must be at least 1, got 0"),
        ({"convert_inputs": (0,)}, "convert_inputs must be at least 1, got 0"),
        ({"refine_steps": -1}, "refine_steps must be at least 0, got -1"),
        ({"refine_batch_size": 0}, "refine_batch_size must be at least 1, got 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        settings(tmp_path, **changes)


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ({"key_dim": 10}, "key_dim must be a multiple of the 4 heads, got 10"),
        ({"key_dim": 48}, "key_dim must be at most heads x head size, 24, got 48"),
        ({"name": "deit_huge"}, "model must be deit-b3, .*, or an architecture of timm, got 'deit_huge'"),
        ({"name": "resnet18"}, "vision transformer that takes depth 1, embed_dim 24, .* got 'resnet18': .*unexpected"),
    ],
)
def test_models_that_cannot_be_are_refused(architecture, message):
    sizes = {"depth": 1, "width": 24, "heads": 4, "image_size": SIDE, "patch_size": 8}
    with pytest.raises(ValueError, match=message):
        vision_models.build(vision_models.Architecture(**sizes | architecture), CLASSES)


@pytest.mark.parametrize(
    ("library", "name", "made"),
    [
        ("timm", "deit3_small_patch16_224", "VisionTransformer"), ("timm", "beit_base_patch16_224", "Beit"),
        ("transformers", "vit", "ViTForImageClassification"), ("transformers", "deit", "DeiTForImageClassification"),
        ("transformers", "beit", "BeitForImageClassification"),
    ],
)  # fmt: skip
def test_models_are_made_by_their_names(library, name, made):
    sizes = {"depth": 1, "width": 24, "heads": 4, "image_size": SIDE, "patch_size": 8}
    for attention in vision_models.ATTENTION:
        architecture = vision_models.Architecture(name=name, library=library, attention=attention, key_dim=12, **sizes)
        model = vision_models.build(architecture, CLASSES)
        assert type(model).__name__ == made
        outputs = model(torch.randn(2, 3, SIDE, SIDE))
        assert (outputs if isinstance(outputs, torch.Tensor) else outputs.logits).shape == (2, 3)


def test_deit_b3_has_the_papers_size():
    for attention, key_dim, parameters in (("concatenate", None, 22.8e6), ("collaborative", 192, 20.2e6)):
        architecture = vision_models.Architecture(name="deit-b3", attention=attention, key_dim=key_dim)
        model = vision_models.build(architecture, tuple(map(str, range(1000))))
        assert vision.trained_parameters(model) == pytest.approx(parameters, abs=0.1e6)


# Runs.


PINNED = {
    ("timm", "concatenate", "cpu"): (1.10025, 1.09742),
    ("timm", "collaborative", "device"): (1.09155, 1.10768),
    ("transformers", "concatenate", "device"): (1.14756, 1.15706),
    ("transformers", "collaborative", "cpu"): (1.16367, 1.15159),
}
"""Losses of two steps."""


@pytest.mark.parametrize(("library", "attention", "augment_on"), PINNED)
def test_two_steps_give_the_losses_they_gave(library, attention, augment_on, data, tmp_path):
    options = {"stochastic_depth": 0.0} if library == "transformers" else {}
    config = settings(
        data, library=library, attention=attention, augment_on=augment_on, key_dim=12, max_steps=2,
        data_on="device" if augment_on == "device" else "host", cache_folder=str(tmp_path / "cache"), **options,
    )  # fmt: skip
    record = train(config, tmp_path / "run", progress=False)
    losses = [loss for _, loss in record.metrics["train"]["losses"]]
    assert losses == pytest.approx(PINNED[library, attention, augment_on], abs=2e-4)
    assert record.metrics["train"]["augment_on"] == augment_on
    assert 0 <= record.metrics["train"]["waiting"] <= 1
    again = collab.sources.open_model(str(tmp_path / "run/model"))
    judged = json.loads(run("evaluate", "vision", tmp_path / "run/model", data, "--json").stdout)
    assert (judged["top1"], judged["top5"]) == (record.metrics["top1"], record.metrics["top5"])
    assert judged["notes"] == ["classes by the model's own names"]
    assert type(again).__name__ in ("VisionTransformer", "ViTForImageClassification")


def test_a_run_that_was_stopped_ends_as_one_that_was_not(data, tmp_path, monkeypatch):
    common = {"epochs": 2.0, "checkpoint_epochs": 0.3, "cache_folder": str(tmp_path / "cache"), "workers": 1}
    config = settings(data, attention="collaborative", key_dim=12, **common)
    whole = train(config, tmp_path / "whole", progress=False)

    class Stopped(Exception):
        pass

    fit = vision.fit

    def stop(*args, **options):
        def after(step, model):
            if step == 3:
                raise Stopped

        return fit(*args, **options, after_step=after)

    with monkeypatch.context() as patch:
        patch.setattr(vision, "fit", stop)
        with pytest.raises(Stopped):
            train(config, tmp_path / "stopped", progress=False)
    again = train(config, tmp_path / "stopped", progress=False)
    assert again.metrics["train"]["losses"] == whole.metrics["train"]["losses"]
    weights = [torch.load(tmp_path / name / "steps/train/weights.pt") for name in ("whole", "stopped")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_a_model_learns_and_is_converted_in_every_way(data, tmp_path):
    config = settings(
        data, epochs=14.0, repeats=1, mixup=0.0, cutmix=0.0, magnitude=0.0, erasing=0.0, base_learning_rate=0.2,
        crop_scale=(0.5, 1.0), augment_on="device", data_on="device", stochastic_depth=0.0, convert_sizes=(12,),
        convert_inputs=(6, 12), convert_dims_per_head=4, map_images=2, refine_steps=5, refine_batch_size=2,
        cache_folder=str(tmp_path / "cache"),
    )  # fmt: skip
    metrics = train(config, tmp_path / "run", progress=False).metrics
    assert metrics["top1"] > 90
    rows = metrics["conversions"]
    assert [(row["method"], row["inputs"]) for row in rows] == [
        ("paper", 0), ("shared", 0), ("calibrated", 6), ("calibrated", 12), ("refined", 6), ("refined", 12),
        ("sparse", 12),
    ]  # fmt: skip
    assert all(row["seconds"] > 0 and row["parameters"] < metrics["parameters"] for row in rows)
    assert [row["refinement"] and (row["refinement"]["joint_steps"], row["refinement"]["batch_size"]) for row in rows] \
        == [None] * 4 + [(5, 2)] * 3  # fmt: skip
    for row in rows:
        assert row["gained"] - row["lost"] == pytest.approx((row["top1"] - metrics["top1"]) / 100 * 12)
    assert list(metrics["maps"]) == ["original", "paper 12", "refined 12"]
    assert numpy.array(metrics["maps"]["original"]).shape == (2, 2, 2)
    assert (tmp_path / "run/maps.png").stat().st_size > 1000
    # The trained model itself, converted without training, from its directory.
    only = settings(
        data, model=str(tmp_path / "run/model"), pretrained=True, epochs=0.0, cache_size=SIDE, convert_sizes=(24, 12),
        convert_methods=("shared",), cache_folder=str(tmp_path / "cache"),
    )  # fmt: skip
    converted = train(only, tmp_path / "converted", progress=False).metrics
    assert (converted["top1"], converted["top5"]) == (metrics["top1"], metrics["top5"])
    assert converted["conversions"][0]["top1"] == metrics["top1"]  # at full size nothing is lost
    assert "train" not in converted


def test_rows_are_every_way_at_every_size():
    rows = rows_of((192, 96, 64), ("unshared", "refined", "sparse"), (2, 8), 64, full=192)
    assert [row.name for row in rows] == [
        "shared-192-0", "unshared-96-0", "refined-96-2", "refined-96-8", "sparse-96-8",
        "unshared-64-0", "refined-64-2", "refined-64-8",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"convert_sizes": (12, 25)}, "convert_sizes must be at most heads x head size, 24, got 25"),
        ({"convert_sizes": (6,), "attention": "collaborative"}, "cannot be converted: already collaborative"),
        ({"convert_sizes": (6,), "convert_inputs": (25,)}, "convert_inputs must be at most the 24 training images"),
        ({"pretrained": True}, "one output for each class, in the order of names, to be trained on"),
        ({"pretrained": True, "model": "few"}, "must name the 3 classes of the images or have as many outputs, got 2"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_trained(changes, message, data, tmp_path, monkeypatch):
    monkeypatch.setattr(vision, "fit", None)
    turned, few = (save_vit(tmp_path / name, names, len(names)) for name, names in TURNED.items())
    if "pretrained" in changes:
        changes = {**changes, "model": str(few if "model" in changes else turned), "library": "transformers",
                   "stochastic_depth": 0.0, "cache_size": SIDE}  # fmt: skip
    with pytest.raises(ValueError, match=message):
        train(settings(data, cache_folder=str(tmp_path / "cache"), **changes), tmp_path / "run", progress=False)


def test_classes_that_only_one_split_has_are_named(tmp_path):
    folder = write(tmp_path / "data", train_images=2, val_images=1)
    (folder / "train/n02").rename(folder / "train/n09")
    with pytest.raises(ValueError, match="the same classes, but only one of them has n02, n09"):
        train(settings(folder, batch_size=2), tmp_path / "run", progress=False)


def test_one_class_only_is_refused(tmp_path):
    write(tmp_path, train_images=2, val_images=1)
    for name in CLASSES[1:]:
        for path in (tmp_path / "train" / name / "images").iterdir():
            path.unlink()
    with pytest.raises(ValueError, match="at least two classes to tell apart, got n01 alone"):
        train(settings(tmp_path, batch_size=2), tmp_path / "run", progress=False)


@pytest.mark.parametrize("path", sorted((Path(__file__).parent.parent / "paper/configs/vision").glob("*.yaml")))
def test_the_papers_configs_can_be_read_and_say_how_they_are_run(path):
    read_config(vision.Config, path, {})
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# collab train vision ")
    assert f"--config paper/configs/vision/{path.name}" in first


# Judging.


def run(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


def save_vit(folder, names=CLASSES, outputs=3):
    """A tiny ViT of transformers, saved."""
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32, image_size=SIDE, patch_size=8,
        num_labels=outputs,
    )  # fmt: skip
    if names:
        config.id2label = dict(enumerate(names))
        config.label2id = {name: place for place, name in enumerate(names)}
    model = randomise_(transformers.ViTForImageClassification(config))
    model.save_pretrained(folder / "vit")
    return folder / "vit"


def test_classes_are_matched_by_name_whatever_their_order(data, tmp_path):
    straight = run("evaluate", "vision", save_vit(tmp_path), data, "--json", "--resize", 16)
    model = collab.sources.open_model(str(tmp_path / "vit"))
    model.config.id2label = dict(enumerate(reversed(CLASSES)))
    model.config.label2id = {name: place for place, name in enumerate(reversed(CLASSES))}
    model.classifier.weight.data = model.classifier.weight.data.flip(0)
    model.classifier.bias.data = model.classifier.bias.data.flip(0)
    model.save_pretrained(tmp_path / "turned")
    turned = run("evaluate", "vision", tmp_path / "turned", data, "--json", "--resize", 16)
    assert json.loads(straight.stdout)["top1"] == json.loads(turned.stdout)["top1"]
    assert outputs_for(model, CLASSES)[0].tolist() == [2, 1, 0]
    assert outputs_for(model, CLASSES[1:])[0].tolist() == [1, 0]
    unnamed = save_vit(tmp_path, names=())
    found = json.loads(run("evaluate", "vision", unnamed, data, "--json", "--resize", 16).stdout)
    assert found["top1"] == json.loads(straight.stdout)["top1"]
    assert "taken in the order of their names" in found["notes"][0]
    assert "does not say how images are prepared" in found["notes"][1]
    more = save_vit(tmp_path, names=(), outputs=5)
    assert "got 5 outputs and no class 'n01'" in run("evaluate", "vision", more, data, code=2).stderr


def test_a_converted_model_is_judged_like_its_original(data, tmp_path):
    folder = save_vit(tmp_path)
    model = collab.sources.open_model(str(folder))
    collab.collaborate_(model, collab.CollaborativeConfig(shared_dim=24))
    collab.save(model, tmp_path / "shared")
    found = [json.loads(run("evaluate", "vision", one, data, "--json").stdout) for one in (folder, tmp_path / "shared")]
    assert found[0]["top1"] == found[1]["top1"]
    assert found[0]["images"] == 12
    table = run("evaluate", "vision", folder, data).stdout
    assert f"{found[0]['top1']:.2f}" in table
    assert "images/s" in table


def test_timms_models_are_opened_by_their_names(monkeypatch):
    asked = []
    tiny = timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=12, num_heads=3)
    monkeypatch.setattr(collab.sources, "_ask_hub", lambda name, file: asked.append((name, file)))
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: asked.append((name, pretrained)) or tiny)
    for name in ("deit_base_patch16_224", "timm/deit_base_patch16_224"):
        assert collab.sources.open_model(name) is tiny
        assert collab.sources.side_files_folder(name) is None
    assert asked == 2 * [("timm/deit_base_patch16_224.fb_in1k", "model.safetensors"), ("deit_base_patch16_224", True)]
    for name in ("google/vit-base", "bert-base-uncased", "facebook/deit_base_patch16_224"):
        assert not collab.sources.is_timm_name(name)


def test_imagenets_classes_are_known_by_their_place():
    model = timm.create_model("vit_tiny_patch16_224", num_classes=1000, depth=1, embed_dim=12, num_heads=3)
    outputs, how = outputs_for(model, ("n01440764", "n15075141"))
    assert outputs.tolist() == [0, 999]
    assert how == "classes by their place in ImageNet"


def test_preparation_is_as_each_library_says(tmp_path):
    model = timm.create_model("vit_tiny_patch16_224", depth=1)
    found, note = classification.preparation_of(model, "")
    assert (found.size, found.resize, found.interpolation, note) == (224, 248, "bicubic", "")
    for one in (Preparation(size=16, resize=None), Preparation(size=16, resize=20, interpolation="bilinear")):
        folder = save_vit(tmp_path)
        classification.write_processor(folder, one)
        opened = collab.sources.open_model(str(folder))
        assert classification.preparation_of(opened, str(folder)) == (one, "")
    grey = Image.new("RGB", (30, 40), (255, 0, 0))
    pixels = one(grey)
    assert pixels.shape == (3, 16, 16)
    assert one.normalised(pixels[None])[0, :, 0, 0].tolist() == [1.0, -1.0, -1.0]


def test_top_five_of_fewer_classes_is_everything():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
    found = accuracy(model, [(torch.randn(4, 3, 2, 2), torch.tensor([0, 1, 2, 0]))])
    assert found.top5 == 100
    assert found.images == 4
    assert 0 <= found.top1 <= 100
    assert 100 * found.right.float().mean() == found.top1
    assert "right" not in found.to_dict()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "there is no nowhere"),
        (["DATA", "--split", "dev"], "--split must be train or val, got 'dev'"),
        (["DATA", "--precision", "int8"], "--precision must be fp32 or bf16"),
        (["DATA", "--mean", "1,2"], "--mean must have 3 values"),
        (["DATA", "--interpolation", "area"], "interpolation must be one of"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments, message, data, tmp_path):
    given = [str(data) if argument == "DATA" else argument for argument in arguments]
    said = run("evaluate", "vision", save_vit(tmp_path), *given, code=2).stderr
    assert message in said
    assert said.count("\n") == 1
