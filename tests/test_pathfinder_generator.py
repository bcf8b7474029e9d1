"""The Pathfinder generator against the original's rasters and pictures, and against a slow version.

Rasters and pictures of the original program lie in `../shared` beside the repository; without that
folder the tests that need them are skipped and the numbers kept here stand for them.
"""

import csv
import functools
import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lra.tasks import pathfinder_generator as pg
from lra.tasks.pathfinder_generator import PathfinderParams, Pictures, generate, params_for

SHARED = Path(__file__).parents[2] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="no ../shared folder")
LEVELS = {"easy": "curv_baseline", "intermediate": "curv_contour_length_9"}
LEVELS["hard"] = "curv_contour_length_14"

# Over 1,500 pictures of the original at 32 pixels, hard: mean over the pictures, spread between them.
ORIGINAL_32_HARD = {
    "mean": (20.116, 1.95),
    "sd": (50.865, 2.47),
    "non-zero": (0.3407, 0.0366),
    "above 127": (0.08482, 0.00860),
    "distractors": (1.1427, 0.913),
}


@functools.cache
def pictures(resolution: int, difficulty: str, count: int, seed: int = 0) -> Pictures:
    return generate(params_for(resolution, difficulty), seed, 0, count)


def same(a: Pictures, b: Pictures) -> bool:
    return all(np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(Pictures))


def rows(a: Pictures, low: int, high: int) -> Pictures:
    return Pictures(*(getattr(a, f.name)[low:high] for f in fields(Pictures)))


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
            headings_NSP=np.zeros(0),
            margins_N=np.array([self.margin]),
            num_distractors_N=np.array([placed]),
            pair_draws_N=np.array([draws + 1]),
        )


@pytest.mark.parametrize(
    ("params", "indices"),
    [
        (params_for(32, "hard"), range(2)),
        (params_for(32, "easy"), range(12)),
        (params_for(64, "easy"), range(2)),
        (params_for(128, "easy", 6), range(3)),
    ],
    ids=["32-hard", "32-easy", "64-easy", "128-easy"],
)
def test_pictures_equal_the_slow_version(params: PathfinderParams, indices: range) -> None:
    fast = generate(params, seed=5, start=0, count=len(indices))
    for index in indices:
        slow = Naive(params, 5, index).picture()
        for field in fields(Pictures):
            if field.name != "headings_NSP":
                expected, actual = getattr(slow, field.name)[0], getattr(fast, field.name)[index]
                np.testing.assert_array_equal(actual, expected, err_msg=field.name)
