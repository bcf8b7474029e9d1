"""The Pathfinder generator against the original's rasters and pictures, and against a slow version.

Rasters and pictures of the original program lie in `../shared` beside the repository; without that
folder the tests that need them are skipped and the numbers kept here stand for them.
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lra.tasks import pathfinder_generator as pg
from lra.tasks.pathfinder_generator import PathfinderParams, Pictures, generate, params_for

SHARED = Path(__file__).parents[3] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="no ../shared folder")
LEVELS = {
    "easy": "curv_baseline",
    "intermediate": "curv_contour_length_9",
    "hard": "curv_contour_length_14",
}


@functools.cache
def pictures(resolution: int, difficulty: str, count: int) -> Pictures:
    return generate(params_for(resolution, difficulty), 0, 0, count)


def assert_same(a: Pictures, b: Pictures) -> None:
    for field in fields(Pictures):
        np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name), field.name)


def rows(a: Pictures, low: int, high: int) -> Pictures:
    return Pictures(*(getattr(a, field.name)[low:high] for field in fields(Pictures)))


def distances(p: Pictures) -> np.ndarray:
    return np.hypot(*(p.markers_N2C[:, 0].astype(float) - p.markers_N2C[:, 1]).T)


def turns(p: Pictures) -> np.ndarray:
    """Absolute turns in degrees, [N, turns of both contours]."""
    turn = (np.diff(p.headings_NSP, axis=2) + 180) % 360 - 180
    return np.abs(turn).reshape(len(turn), -1)


# Rasters ------------------------------------------------------------------------------------------


def test_paddle_at_angle_zero_is_the_documented_row() -> None:
    line, mask = pg.paddle_rasters(params_for(32, "hard"), 1, np.zeros(1))
    assert line.shape == mask.shape == (1, 9, 9)
    assert line[0].any(axis=1).sum() == 1
    assert line[0][line[0].any(axis=1)].tolist() == [[0, 0, 2, 0, 102, 135, 116, 0, 0]]


@needs_shared
@pytest.mark.parametrize(
    ("name", "resolution", "margin"),
    [("p32", 32, 1), ("p64", 64, 1), ("p128_m2", 128, 2), ("p128_m3", 128, 3), ("p256", 256, 3)],
)
def test_paddles_equal_the_original_bit_for_bit(name: str, resolution: int, margin: int) -> None:
    golden = np.load(SHARED / "extra" / "pathfinder" / "rasters.npz")
    params = params_for(resolution, "hard")
    line, mask = pg.paddle_rasters(params, margin, np.radians(golden["degrees"]))
    np.testing.assert_array_equal(line, golden[f"{name}_line"])
    np.testing.assert_array_equal(mask, golden[f"{name}_mask"])


def alone(params: PathfinderParams, y: int, x: int) -> np.ndarray:
    """A picture of nothing but a marker."""
    nothing = np.zeros((params.resolution, params.resolution), np.uint8)
    return pg._compose(params, nothing, nothing, np.array([[y, x], [y, x]]))


@needs_shared
@pytest.mark.parametrize("resolution", [32, 64, 128, 256])
def test_markers_equal_the_original_bit_for_bit(resolution: int) -> None:
    golden = np.load(SHARED / "extra" / "pathfinder" / "rasters.npz")[f"p{resolution}_marker"]
    side = len(golden)
    marker = alone(params_for(resolution, "hard"), 16, 16)
    np.testing.assert_array_equal(marker[:side, :side], golden)
    assert not marker[side:].any() and not marker[:, side:].any()


@pytest.mark.parametrize("resolution", [32, 128])
@pytest.mark.parametrize("place", [(0, 0), (1, 2), (2, 9), (7, 7), (-1, -2), (-4, 0), (11, -3)])
def test_marker_on_its_cutout_is_the_marker_on_the_whole_window(
    resolution: int, place: tuple[int, int]
) -> None:
    params = params_for(resolution, "hard")
    y, x = (c % resolution for c in place)
    np.testing.assert_array_equal(alone(params, y, x), naive_marker(params, y, x))


# A slow version: the description of the original word for word, on whole windows ------------------


def naive_marker(params: PathfinderParams, y: int, x: int) -> np.ndarray:
    grid = np.mgrid[: 2 * params.resolution, : 2 * params.resolution]
    distance = np.hypot(grid[0] - 2 * y, grid[1] - 2 * x)
    disc = np.where(distance <= 2 * params.marker_radius, 255, 0).astype(np.uint8)
    size = (params.resolution, params.resolution)
    return np.asarray(Image.fromarray(disc).resize(size, Image.Resampling.LANCZOS))


def move(point: np.ndarray, angle: float, distance: float) -> np.ndarray:
    return np.ceil(point + distance * np.array([math.sin(angle), math.cos(angle)])).astype(int)


def turned(angle: float) -> float:
    return angle + math.pi if angle < 0 else angle - math.pi


def dilate(image: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Grey dilation; outside counts as the most negative number."""
    side, reach = len(image), int(np.abs(offsets).max())
    padded = np.pad(image, reach, constant_values=-np.inf)
    shifted = [
        padded[reach + y : reach + y + side, reach + x : reach + x + side] for y, x in offsets
    ]
    return np.max(shifted, axis=0)


class Naive:
    """One picture, from the same random numbers as the generator's."""

    def __init__(self, params: PathfinderParams, seed: int, index: int) -> None:
        stream = pg._streams(seed, np.array([index]))
        self.draw: Callable[[int], float] = lambda place: float(
            pg._uniform(stream, np.array([place]))[0]
        )
        self.params, self.side = params, params.resolution
        self.label = int(self.draw(0) < 0.5)
        self.margin = params.margins[int(self.draw(1) * len(params.margins))]
        self.radius = params.paddle_length + self.margin
        grid = np.argwhere(np.ones((2 * self.margin + 1,) * 2)) - self.margin
        self.disc = grid[(grid**2).sum(axis=1) <= self.margin**2]
        self.frame = np.ones((self.side, self.side))
        inner = slice(params.padding, -params.padding)
        self.frame[inner, inner] = 0

    @functools.cache  # noqa: B019
    def raster(self, angle: float) -> tuple[np.ndarray, np.ndarray]:
        line, mask = pg.paddle_rasters(self.params, self.margin, np.array([angle]))
        return line[0] / 255, mask[0] / 255

    def paste(self, tile: np.ndarray, point: np.ndarray) -> np.ndarray:
        reach = len(tile) // 2
        canvas = np.zeros((self.side + 2 * reach,) * 2)
        y, x = point
        canvas[y : y + len(tile), x : x + len(tile)] = tile
        return canvas[reach:-reach, reach:-reach]

    def free(self, forbidden: np.ndarray, angle: float) -> np.ndarray:
        tile = self.raster(angle)[1]
        window = np.zeros((2 * self.radius + 1,) * 2)
        reach = len(tile) // 2
        for y, x in np.argwhere(tile == 1) - reach + self.radius + 1:
            if 0 <= y < len(window) and 0 <= x < len(window):
                window[y, x] = 1
        dilated = dilate(forbidden, np.argwhere(window) - self.radius)
        if dilated.min() < 0:
            return np.zeros((0, 2), int)
        return np.argwhere(dilated <= 0.3)

    def snake(self, tail: np.ndarray, angle: float) -> dict | None:
        head = move(tail, angle, self.params.paddle_length)
        pivot = move(head, turned(angle), self.radius)
        if min(*head, *pivot) < 0 or max(*head, *pivot) >= self.side:
            return None
        line, mask = self.raster(angle)
        return {
            "image": self.paste(line, tail),
            "last": self.paste(mask, tail),
            "pivot": pivot,
            "angle": angle,
            "origin": tuple(tail.tolist()),
            "tip": tuple(tail.tolist()),
        }

    def extend(self, snake: dict, occupancy: np.ndarray, place: int) -> np.ndarray | None:
        """The new occupancy, or None."""
        params = self.params
        centre = move(snake["pivot"], snake["angle"], params.paddle_length + 2 * self.margin)
        dilated = dilate(occupancy, self.disc)
        points = set()
        step = 360 / (2 * math.pi * self.radius)
        for number in range(math.ceil(360 / step)):
            angle = math.radians(number * step)
            y = centre[0] + self.radius * math.sin(angle)
            x = centre[1] + self.radius * math.cos(angle)
            if 0 <= y < self.side and 0 <= x < self.side:
                points.add((int(y), int(x)))
        candidates, weights = sorted(points), []
        for y, x in candidates:
            turn = abs(math.atan2(y - centre[0], x - centre[1]) - snake["angle"])
            turn = min(turn, 2 * math.pi - turn)
            bent = min(params.continuity * turn, math.pi / 2)
            weights.append(math.cos(bent) ** 2 * (1 - dilated[y, x]))
        if sum(weights) < 1e-4:
            return None
        for attempt in range(3):
            level = self.draw(place + attempt) * sum(weights)
            tip = candidates[int(np.searchsorted(np.cumsum(weights), level, side="right"))]
            angle = math.atan2(tip[0] - centre[0], tip[1] - centre[1])
            line, mask = (self.paste(tile, np.array(tip)) for tile in self.raster(turned(angle)))
            if (occupancy + mask).max() < 1.8:
                occupancy = np.maximum(occupancy, snake["last"])
                snake["image"] = np.maximum(snake["image"], line)
                snake.update(last=mask, pivot=centre, angle=angle, tip=tip)
                return occupancy
        return None

    def pair(self, place: int) -> tuple[list[dict], np.ndarray] | None:
        """Both snakes and the occupancy after them."""
        distance, occupancy = self.params.seed_distance, self.frame
        angle = math.radians(int(self.draw(place) * 360) - 180)
        forbidden = np.ones_like(occupancy)
        inner = slice(2 * distance, -2 * distance)
        forbidden[inner, inner] = occupancy[inner, inner]
        free = self.free(forbidden, angle)
        if not len(free):
            return None
        ys, xs = np.unique(free[:, 0]), np.unique(free[:, 1])
        assert len(ys) * len(xs) == len(free)  # two draws are then as good as one among all
        ys, xs = ys[int(self.draw(place + 1) * len(ys))], xs[int(self.draw(place + 2) * len(xs))]
        first = self.snake(np.array([ys, xs]), angle)
        assert first is not None
        around = math.radians(int(self.draw(place + 4) * 360))
        away = distance * np.array([math.sin(around), math.cos(around)])
        tail = np.rint(np.array(first["origin"]) + away).astype(int)
        second = self.snake(tail, math.radians(int(self.draw(place + 3) * 360) - 180))
        assert second is not None
        for step in range(2 * (self.params.num_paddles - 1)):
            grown = self.extend((first, second)[step % 2], occupancy, place + 5 + 3 * step)
            if grown is None:
                return None
            occupancy = grown
        return [first, second], np.maximum(occupancy, second["last"])

    def distractor(self, occupancy: np.ndarray, place: int) -> tuple[dict, np.ndarray] | None:
        if (occupancy <= 0.3).mean() < 0.01:
            return None
        forbidden = occupancy.copy()
        forbidden[[0, -1]] = forbidden[:, [0, -1]] = 1
        for attempt in range(3):
            start = place + attempt * (pg.BLIND_DRAWS + 2)
            angle = math.radians(int(self.draw(start) * 360) - 180)
            free = self.free(forbidden, angle)
            if not len(free):
                return None
            spots = [
                divmod(int(self.draw(start + 1 + b) * self.side**2), self.side)
                for b in range(pg.BLIND_DRAWS)
            ]
            all_free = {tuple(point) for point in free.tolist()}
            hits = [spot for spot in spots if spot in all_free]
            last = free[int(self.draw(start + 1 + pg.BLIND_DRAWS) * len(free))]
            snake = self.snake(np.array(hits[0]) if hits else last, angle)
            if snake is not None:
                break
        else:
            return None
        start = place + 3 * (pg.BLIND_DRAWS + 2)
        for step in range(self.params.paddles_per_distractor - 1):
            grown = self.extend(snake, occupancy, start + 3 * step)
            if grown is None:
                return None
            occupancy = grown
        return snake, np.maximum(occupancy, snake["last"])

    def picture(self) -> Pictures:
        params, draws = self.params, 0
        places = 5 + 6 * (params.num_paddles - 1)
        while (pair := self.pair(pg._FIRST_PAIR + draws * places)) is None:
            draws += 1
        snakes, occupancy = pair
        contrast = params.snake_contrast
        image = np.maximum(snakes[0]["image"], snakes[1]["image"])
        image = (image * contrast * params.paddle_contrast).astype(np.float32)
        placed = 0
        places = 3 * (pg.BLIND_DRAWS + 2) + 3 * (params.paddles_per_distractor - 1)
        for number in range(params.num_distractors):
            for attempt in range(5):
                place = pg._FIRST_DISTRACTOR + (5 * number + attempt) * places
                if (found := self.distractor(occupancy, place)) is not None:
                    snake, occupancy = found
                    image = np.maximum(image, (snake["image"] * contrast).astype(np.float32))
                    placed += 1
                    break
        marked = int(self.draw(2) * 2)
        markers = [snakes[marked]["origin"]]
        markers.append(snakes[marked if self.label else 1 - marked]["tip"])
        image = image.astype(np.float64)
        for y, x in markers:
            image = np.maximum(image, naive_marker(params, y, x) / 255)
        image = (image - image.min()) / (image.max() - image.min()) * 255
        return Pictures(
            images_NRR=(image + 0.5).astype(np.uint8)[None],
            labels_N=np.array([self.label]),
            markers_N2C=np.array([markers]),
            origins_NSC=np.array([[snake["origin"] for snake in snakes]]),
            terminals_NSC=np.array([[snake["tip"] for snake in snakes]]),
            headings_NSP=np.zeros(0, np.float32),
            margins_N=np.array([self.margin]),
            num_distractors_N=np.array([placed]),
            pair_draws_N=np.array([draws + 1]),
        )


@pytest.mark.parametrize(
    ("params", "count"),
    [
        (params_for(32, "hard"), 2),
        (params_for(32, "easy"), 12),
        (params_for(64, "intermediate", 12), 4),
        (params_for(128, "easy", 6), 3),
        (params_for(256, "easy", 1), 1),
    ],
    ids=["32-hard", "32-easy", "64-intermediate", "128-easy", "256-easy"],
)
def test_pictures_equal_the_slow_version(params: PathfinderParams, count: int) -> None:
    assert pg.FREE_MAX / 255 <= 0.3 < (pg.FREE_MAX + 1) / 255
    fast = generate(params, seed=5, start=0, count=count)
    for index in range(count):
        slow = Naive(params, 5, index).picture()
        for field in fields(Pictures):
            if field.name != "headings_NSP":
                expected, actual = getattr(slow, field.name)[0], getattr(fast, field.name)[index]
                np.testing.assert_array_equal(actual, expected, err_msg=f"{field.name} {index}")


# Contract -----------------------------------------------------------------------------------------


def test_any_division_gives_the_same_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    params = params_for(128, "easy")
    whole = generate(params, 7, 100, 24)
    for low, high in ((0, 1), (1, 11), (11, 24), (5, 5)):
        assert_same(generate(params, 7, 100 + low, high - low), rows(whole, low, high))
    monkeypatch.setattr(pg, "CHUNK", 5)
    monkeypatch.setattr(pg, "MAP_BYTES", 1)
    assert_same(generate(params, 7, 100, 24), whole)


def test_seed_and_index_make_the_picture() -> None:
    params = params_for(32, "easy")
    a, b = generate(params, 0, 0, 100), generate(params, 1, 0, 100)
    images = np.concatenate([a.images_NRR, b.images_NRR]).reshape(200, -1)
    assert len(np.unique(images, axis=0)) == 200
    assert 30 < (a.labels_N != b.labels_N).sum() < 70


@pytest.mark.parametrize("resolution", [32, 128, 256])
def test_truth_fits_the_picture(resolution: int) -> None:
    p = pictures(resolution, "easy", 150)
    params = params_for(resolution, "easy")
    assert p.images_NRR.shape == (150, resolution, resolution) and p.images_NRR.dtype == np.uint8
    assert (p.images_NRR.max(axis=(1, 2)) == 255).all()
    assert (p.images_NRR.min(axis=(1, 2)) == 0).all()
    assert set(p.labels_N.tolist()) == {0, 1}
    assert set(p.margins_N.tolist()) == set(params.margins)
    seen = set()
    for n in range(150):
        origins, terminals = p.origins_NSC[n].tolist(), p.terminals_NSC[n].tolist()
        marked = origins.index(p.markers_N2C[n, 0].tolist())
        other = marked if p.labels_N[n] else 1 - marked
        assert p.markers_N2C[n, 1].tolist() == terminals[other]
        seen.add((marked, int(p.labels_N[n])))
        for y, x in p.markers_N2C[n].tolist():
            # A marker has the value 1; at 32 pixels distractors can be brighter, up to 1.2.
            assert p.images_NRR[n, y, x] >= (250 if resolution > 32 else 210)
        for y, x in origins + terminals:
            assert p.images_NRR[n, max(y - 1, 0) : y + 2, max(x - 1, 0) : x + 2].max() > 80
    assert seen == {(0, 0), (0, 1), (1, 0), (1, 1)}
    gap = np.hypot(*(p.origins_NSC[:, 0].astype(float) - p.origins_NSC[:, 1]).T)
    assert (abs(gap - params.seed_distance) < 0.75).all()
    assert turns(p).max() < 90 / params.continuity


def test_first_seeds_lie_where_the_original_puts_them() -> None:
    p = pictures(32, "easy", 150)
    assert np.unique(p.origins_NSC[:, 0]).tolist() == [14, 15, 16]
    assert p.headings_NSP[:, 0, 0].min() >= -150 and p.headings_NSP[:, 0, 0].max() <= -121


@pytest.mark.parametrize(
    ("resolution", "margin", "count"), [(32, 1, 30), (64, 1, 95), (128, 2, 354), (128, 3, 360)]
)
def test_number_of_usable_degrees(resolution: int, margin: int, count: int) -> None:
    usable = pg._tables(params_for(resolution, "hard"), margin).usable_H
    assert usable.shape == (360,) and usable.sum() == count
    if resolution == 64:
        assert np.flatnonzero(~usable).tolist() == [45, *range(96, 360)]  # -135 and from -84 on


def test_halves_are_rounded_as_in_the_original() -> None:
    images = pictures(128, "easy", 150).images_NRR
    assert (images == 229).any() and not (images == 230).any()  # 0.9 * 255
    images = generate(params_for(32, "easy", 0), 0, 0, 100).images_NRR
    assert (images == 157).any() and not (images == 158).any()  # 1.5 * 105
    assert (images == 71).sum() > 10 * (images == 70).sum()  # 1.5 * 47; 70 only near markers


@pytest.mark.parametrize(
    ("resolution", "difficulty", "expected"),
    [(32, "hard", 5), (32, "intermediate", 6), (32, "easy", 10), (64, "hard", 5)]
    + [(128, "hard", 8), (256, "hard", 7)],
)
def test_default_number_of_distractors(resolution: int, difficulty: str, expected: int) -> None:
    params = params_for(resolution, difficulty)
    assert params.num_distractors == expected
    assert params.paddles_per_distractor == params.num_paddles // 3
    assert replace(params, num_distractors=3) == params_for(resolution, difficulty, 3)


def test_number_of_distractors_is_honoured() -> None:
    none = generate(params_for(128, "easy", 0), 0, 0, 20)
    some = generate(params_for(128, "easy", 9), 0, 0, 20)
    assert none.num_distractors_N.max() == 0 and some.num_distractors_N.min() >= 6
    np.testing.assert_array_equal(none.terminals_NSC, some.terminals_NSC)
    assert some.images_NRR.mean() > 1.3 * none.images_NRR.mean()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("resolution", 28),
        ("padding", 0),
        ("padding", 15),
        ("seed_distance", 5),
        ("paddle_length", 0),
        ("thickness", 0.7),
        ("thickness", 0.0),
        ("margins", ()),
        ("margins", (0, 1)),
        ("marker_radius", 0),
        ("continuity", 0.0),
        ("snake_contrast", -1.0),
        ("paddle_contrast", 0.0),
        ("num_paddles", 0),
        ("paddles_per_distractor", 0),
        ("num_distractors", -1),
    ],
)
def test_bad_parameters_are_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{field}=.*must be"):
        replace(params_for(32, "hard"), **{field: value})


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"resolution=48.*\[32, 64, 128, 256\]"):
        params_for(48, "hard")
    with pytest.raises(ValueError, match="difficulty='harder'.*'intermediate'"):
        params_for(32, "harder")
    for bad in ({"seed": -1}, {"start": -1}, {"count": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))}=-1"):
            generate(params_for(32, "easy"), **({"seed": 0, "start": 0, "count": 1} | bad))


def test_contours_without_room_end_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pg, "MAX_PAIR_DRAWS", 2000)
    with pytest.raises(ValueError, match="num_paddles=60 at resolution=32: no room"):
        generate(replace(params_for(32, "hard"), num_paddles=60), 0, 0, 1)


# Statistics: means and spreads between pictures of 1,500 pictures of the original -----------------


def per_picture(images_NRR: np.ndarray) -> dict[str, np.ndarray]:
    flat = images_NRR.reshape(len(images_NRR), -1).astype(float)
    return {
        "mean": flat.mean(axis=1),
        "sd": flat.std(axis=1),
        "non-zero": (flat > 0).mean(axis=1),
        "above 127": (flat > 127).mean(axis=1),
    }


def test_statistics_at_32_hard() -> None:
    p = pictures(32, "hard", 1500)
    positive = p.labels_N == 1
    actual = per_picture(p.images_NRR) | {
        "distractors": p.num_distractors_N,
        "pair draws": p.pair_draws_N,
        "distance, positive": distances(p)[positive],
        "distance, negative": distances(p)[~positive],
        "labels": p.labels_N,
    }
    original = {  # mean and spread of one picture
        "mean": (20.116, 1.96),
        "sd": (50.865, 2.47),
        "non-zero": (0.3407, 0.0366),
        "above 127": (0.0848, 0.0086),
        "distractors": (1.143, 0.91),
        "pair draws": (307, 307),
        "distance, positive": (13.14, 5.2),
        "distance, negative": (12.95, 5.2),
        "labels": (0.5, 0.5),
    }
    for name, (mean, spread) in original.items():
        error = spread * math.sqrt(2 / len(actual[name]))
        assert abs(actual[name].mean() - mean) < 3 * error, (name, actual[name].mean(), mean, error)
        assert abs(actual[name].std() / spread - 1) < 0.1, (name, actual[name].std(), spread)
    # The spread of shares in ten-degree bins between samples is about 0.004.
    shares = np.histogram(turns(p), bins=np.arange(0, 100, 10))[0] / turns(p).size
    expected = [0.185, 0.150, 0.174, 0.128, 0.098, 0.112, 0.082, 0.064, 0.006]
    np.testing.assert_allclose(shares, expected, atol=0.015)
    counts = np.bincount(p.num_distractors_N, minlength=6)
    np.testing.assert_allclose(counts[:5], [387, 639, 366, 91, 15], atol=80)


# Against all pictures of the original: prints a table ---------------------------------------------

RELEASE = SHARED / "lra_release" / "lra_release"
EXTRA = SHARED / "extra" / "pathfinder"
SWEEP = EXTRA / "level_sweep"
# Of the original: distractors, folders of pictures and truth, draws of a pair, mean turn and the
# number of pairs it was taken from, share of each level of distractors; and how many we make.
SETS = [
    (32, "hard", None, RELEASE, EXTRA, 307, (32.6, 150), 6000),
    (32, "intermediate", None, RELEASE, EXTRA, 72, None, 6000),
    (32, "easy", None, RELEASE, EXTRA, 24, (31.4, 100), 6000),
    (64, "hard", None, RELEASE, EXTRA, 4448, None, 600),
    (128, "hard", None, RELEASE, EXTRA, 335, (18.9, 12), 600),
    (256, "hard", None, RELEASE, EXTRA, 9.3, (15.6, 30), 600),
    (32, "hard", 10, SWEEP, SWEEP, 331, None, 3000),
    (128, "hard", 17, SWEEP, SWEEP, 383, None, 300),
]


def read_original(folder: Path, truth: Path) -> dict[str, np.ndarray]:
    """Statistics of each picture; the empty file of the release is left out."""
    with truth.open() as file:
        table = [
            row
            for row in csv.DictReader(file, delimiter="\t")
            if (folder / row["file"]).stat().st_size
        ]
    columns = {k: np.array([float(row[k]) for row in table]) for k in table[0] if k != "file"}
    distance = np.hypot(
        columns["mark1_y"] - columns["mark2_y"], columns["mark1_x"] - columns["mark2_x"]
    )
    images = np.stack([np.asarray(Image.open(folder / row["file"])) for row in table])
    return per_picture(images) | {
        "distractors": columns["distractors"],
        "distance, positive": distance[columns["label"] == 1],
        "distance, negative": distance[columns["label"] == 0],
        "greys": images,
    }


@needs_shared
@pytest.mark.slow
def test_comparison_with_the_original(capsys: pytest.CaptureFixture[str]) -> None:
    lines, far = ["", f"{'':43}{'ours':>10}{'theirs':>10}{'error':>9}{'z':>6}"], []
    for resolution, difficulty, num, folder, truth, draws, turn, count in SETS:
        name = f"pathfinder{resolution}/{LEVELS[difficulty]}"
        theirs = read_original(
            folder / name, truth / f"truth_{resolution}_{LEVELS[difficulty]}.tsv"
        )
        params = params_for(resolution, difficulty, num)
        p = generate(params, 0, 0, count)
        positive = p.labels_N == 1
        ours = per_picture(p.images_NRR) | {
            "distractors": p.num_distractors_N,
            "distance, positive": distances(p)[positive],
            "distance, negative": distances(p)[~positive],
            "pair draws": p.pair_draws_N,
            "turn": turns(p).mean(axis=1),
        }
        known = {key: (theirs[key].mean(), len(theirs[key])) for key in theirs if key != "greys"}
        known["pair draws"] = (draws, len(theirs["mean"]))
        if turn:
            known["turn"] = turn
        for key, (mean, n) in known.items():
            # Our spread for both: with few pictures theirs is itself uncertain.
            error = ours[key].std() * math.sqrt(1 / n + 1 / len(ours[key]))
            z = (ours[key].mean() - mean) / error
            title = f"{resolution} {difficulty} K={params.num_distractors} ({n}) {key}"
            numbers = f"{ours[key].mean():10.4f}{mean:10.4f}{error:9.4f}{z:6.1f}"
            lines.append(f"{title:43}{numbers}")
            if abs(z) > 3:
                far.append(lines[-1])
        # Every grey value that many of their pictures have is in ours, and the other way round.
        has = [
            {v for v in range(256) if (images == v).any(axis=(1, 2)).mean() > share}
            for images, share in ((theirs["greys"], 0.1), (p.images_NRR, 0))
        ]
        assert has[0] <= has[1], (name, has[0] - has[1])
        common = {v for v in range(256) if (p.images_NRR == v).any(axis=(1, 2)).mean() > 0.3}
        assert common <= set(np.unique(theirs["greys"]).tolist()), name
    with capsys.disabled():
        print("\n".join(lines))
    assert not far, far
