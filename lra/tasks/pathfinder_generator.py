"""Generator of Pathfinder pictures: two dashed contours among others; do the markers share one?

Follows the distribution of the original program (Linsley et al. 2018,
https://github.com/drewlinsley/pathfinder, commit ab9c130), its roundings and border effects
included, with the settings of the Long Range Arena paper. What differs is the work done: what
depends on a paddle's heading alone is tabulated once, the occupancy is looked up around a paddle's
tip instead of being dilated as a whole, and many attempts advance together, paddle by paddle.

Points are (y, x), y down; a heading t points along (sin t, cos t). Occupancy and rasters are bytes,
255 meaning 1.0. A map is the window with a border, so that no index ever leaves it; the border
counts as occupied. Pixels are indices into a flat map.

Random numbers: each picture has its own SplitMix64 stream, and each choice a fixed place in it,
given by the numbers of the attempt and the paddle. So a picture depends on the seed, its index and
the parameters, never on the pictures and attempts that are computed beside it.

Shapes: N pictures or attempts, R resolution, S = 2 target contours, P paddles of a contour,
H headings, J candidates for the next paddle, Q pixels of a raster, C = 2 coordinates,
K distractors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

ByteArray = NDArray[np.uint8]
IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
StreamArray = NDArray[np.uint64]

NUM_PADDLES = {"easy": 6, "intermediate": 9, "hard": 14}

# The original's constants.
SUPERSAMPLING = 2
NUM_DEGREES = 360  # seeds point in whole degrees
SEED_TRIES = 3
PADDLE_TRIES = 3
DISTRACTOR_TRIES = 5
MIN_TOTAL_WEIGHT = 1e-4
FREE_MAX = 76  # a pixel is free up to an occupancy of 0.3
MIN_FREE_SHARE = 0.01
OVERLAP = 1.8  # the sum of occupancy and mask at which a paddle is refused

# Ours, without influence on the pictures: memory of the maps in work at once, pictures in work at
# once, and the number of draws after which the parameters are taken for impossible.
MAP_BYTES = 8 << 20
CHUNK = 256
MAX_PAIR_DRAWS = 1_000_000
# Blind draws of a distractor's seed before the free pixels are listed; changes the random numbers.
BLIND_DRAWS = 16


@dataclass(frozen=True)
class PathfinderParams:
    """What shapes a picture, lengths in pixels; `params_for` gives the sets of the benchmark.

    Raises ValueError, naming the field, for a value that the generator cannot honour.
    """

    resolution: int
    padding: int  # width of the frame that is occupied from the start
    seed_distance: int
    paddle_length: int
    thickness: float
    margins: tuple[int, ...]  # one is drawn for each picture
    marker_radius: float
    continuity: float
    snake_contrast: float
    paddle_contrast: float  # of targets only
    num_paddles: int  # of each target contour
    paddles_per_distractor: int
    num_distractors: int

    def __post_init__(self) -> None:
        for name in ("padding", "paddle_length", "num_paddles"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("marker_radius", "continuity", "snake_contrast", "paddle_contrast"):
            self._require(name, getattr(self, name) > 0, "above 0")
        width = self.thickness * SUPERSAMPLING
        self._require("thickness", width >= 1 and width == int(width), "0.5, 1.0, 1.5 and so on")
        margins = len(self.margins) > 0 and min(self.margins) >= 1
        self._require("margins", margins, "one or more integers of at least 1")
        self._require("num_distractors", 0 <= self.num_distractors < 256, "from 0 to 255")
        least = 1 if self.num_distractors else 0
        self._require("paddles_per_distractor", self.paddles_per_distractor >= least, "at least 1")
        # Seeds of targets are not checked against the window: these three keep them inside.
        most = 2 * self.seed_distance
        self._require("padding", self.padding <= most, f"at most {most}, twice seed_distance")
        least = self.paddle_length + max(self.margins) + 3
        self._require("seed_distance", self.seed_distance >= least, f"at least {least}")
        least = 4 * self.seed_distance + 1
        self._require("resolution", self.resolution >= least, f"at least {least}")

    def _require(self, name: str, ok: bool, expected: str) -> None:
        if not ok:
            raise ValueError(f"pathfinder: {name}={getattr(self, name)!r}, must be {expected}")


# The hard level of each size, in the order of the fields.
_HARD = {
    32: PathfinderParams(32, 1, 7, 2, 0.5, (1,), 1.5, 1.0, 2.0, 0.75, 14, 4, 5),
    64: PathfinderParams(64, 1, 12, 5, 1.0, (1,), 2.5, 1.8, 0.8, 1.0, 14, 4, 5),
    128: PathfinderParams(128, 1, 20, 5, 1.5, (2, 3), 3.0, 1.8, 0.9, 1.0, 14, 4, 8),
    256: PathfinderParams(256, 22, 27, 5, 2.0, (3,), 5.0, 1.8, 1.0, 1.0, 14, 4, 7),
}
_BUDGET = {32: 20, 64: 22, 128: 35, 256: 30}  # paddles of all distractors of a picture


def params_for(
    resolution: int, difficulty: str, num_distractors: int | None = None
) -> PathfinderParams:
    """Parameters of one picture size and level (easy, intermediate, hard).

    `num_distractors` is by default what the size's budget of distractor paddles allows. Raises
    ValueError for an unknown size or level.
    """
    if resolution not in _HARD:
        raise ValueError(f"pathfinder: resolution={resolution!r}, must be one of {[*_HARD]}")
    if difficulty not in NUM_PADDLES:
        raise ValueError(f"pathfinder: difficulty={difficulty!r}, must be one of {[*NUM_PADDLES]}")
    length = NUM_PADDLES[difficulty] // 3
    if num_distractors is None:
        num_distractors = _BUDGET[resolution] // length
    return replace(
        _HARD[resolution],
        num_paddles=NUM_PADDLES[difficulty],
        paddles_per_distractor=length,
        num_distractors=num_distractors,
    )


@dataclass
class Pictures:
    """Pictures and the truth about them, one row each.

    Contour 0 starts near the middle of the picture, contour 1 at a fixed distance from there. The
    origin is the end at which a contour starts, the terminal its other end; marker 0 is always at
    an origin and marker 1 at a terminal, of the same contour where the label is 1.
    """

    images_NRR: ByteArray
    labels_N: ByteArray
    markers_N2C: NDArray[np.int16]
    origins_NSC: NDArray[np.int16]
    terminals_NSC: NDArray[np.int16]
    headings_NSP: NDArray[np.float32]  # degrees, of the paddles of both target contours
    margins_N: ByteArray
    num_distractors_N: ByteArray  # those that are there; some find no room
    pair_draws_N: IntArray  # draws of the two targets, the successful one included

    @classmethod
    def blank(cls, params: PathfinderParams, count: int) -> Pictures:
        """Arrays of the right sizes, contents undefined."""
        return cls(
            images_NRR=np.empty((count, params.resolution, params.resolution), np.uint8),
            labels_N=np.empty(count, np.uint8),
            markers_N2C=np.empty((count, 2, 2), np.int16),
            origins_NSC=np.empty((count, 2, 2), np.int16),
            terminals_NSC=np.empty((count, 2, 2), np.int16),
            headings_NSP=np.empty((count, 2, params.num_paddles), np.float32),
            margins_N=np.empty(count, np.uint8),
            num_distractors_N=np.empty(count, np.uint8),
            pair_draws_N=np.empty(count, np.int64),
        )


def generate(params: PathfinderParams, seed: int, start: int, count: int) -> Pictures:
    """Pictures start .. start + count - 1 of the endless row that `params` and `seed` stand for.

    Any division of the row into calls gives the same pictures; calls of 64 and more are fastest.
    Raises ValueError for a negative seed, start or count, and for parameters that leave no room
    for the two target contours.
    """
    for name, value in (("seed", seed), ("start", start), ("count", count)):
        if not 0 <= value < 2**63:
            raise ValueError(f"pathfinder: {name}={value}, must be from 0 to 2**63 - 1")
    pictures = Pictures.blank(params, count)
    for low in range(0, count, CHUNK):
        index_N = np.arange(low, min(low + CHUNK, count))
        stream_N = _streams(seed, start + index_N)
        # The picture's own draws: label, margin, and the contour with the marker at its origin.
        draw_N3 = _uniform(stream_N[:, None], np.arange(3))
        pictures.labels_N[index_N] = draw_N3[:, 0] < 0.5
        margin_N = np.array(params.margins)[_below(draw_N3[:, 1], len(params.margins))]
        pictures.margins_N[index_N] = margin_N
        for margin in np.unique(margin_N).tolist():
            rows = np.flatnonzero(margin_N == margin)
            marked_N = _below(draw_N3[rows, 2], 2)
            _draw(_tables(params, margin), stream_N[rows], marked_N, pictures, index_N[rows])
    return pictures


# Random numbers: 2**8 places for the picture itself, then the target pairs, then the distractors.
_FIRST_PAIR = 1 << 8
_FIRST_DISTRACTOR = 1 << 48
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: StreamArray) -> StreamArray:
    """The output function of SplitMix64 (Steele, Lea and Flood 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _streams(seed: int, index_N: IntArray) -> StreamArray:
    """The start of each picture's stream."""
    root = _mix(np.array([seed], np.uint64) + _GOLDEN)
    return _mix(root + index_N.astype(np.uint64) * _GOLDEN)


def _uniform(stream: StreamArray, place: IntArray) -> FloatArray:
    """The draws at these places, in [0, 1); 52 bits, so that draw * total is below total."""
    bits = _mix(stream + (place + 1).astype(np.uint64) * _GOLDEN)
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _below(draw: FloatArray, bound: IntArray | int) -> IntArray:
    """Turn draws into whole numbers from 0 to bound - 1."""
    return (draw * bound).astype(np.int64)


class _Raster(NamedTuple):
    """For each heading the pixels of a small picture, counted from a paddle's start, and values.

    Shorter lists are filled up with repeats, which makes writing them harmless.
    """

    pixel_HQ: IntArray
    value_HQ: ByteArray


class _Tables:
    """All that depends on the heading of a paddle, for one margin.

    Headings are numbered: first the whole degrees -180 .. 179 of seeds, then the directions from
    the centre of a circle to its candidates.
    """

    def __init__(self, params: PathfinderParams, margin: int) -> None:
        self.params = params
        length = params.paddle_length
        radius = length + margin
        # Room for a raster around any point inside, and for the candidates beyond the last pivot.
        self.border = max(length + math.ceil(params.thickness) + margin, radius + 2 * margin + 3)
        self.side = params.resolution + 2 * self.border
        inner = slice(self.border + params.padding, -self.border - params.padding)
        frame = np.full((self.side, self.side), 255, np.uint8)
        frame[inner, inner] = 0
        self.empty = frame.ravel()
        inside = np.zeros((self.side, self.side), np.bool_)
        self.window(inside)[:] = True
        self.inside = inside.ravel()

        # Candidates lie a pixel of arc apart; the original truncates their coordinates.
        arc_J = np.radians(np.arange(0, 360, 360 / (2 * math.pi * radius)))
        candidate_JC = np.unique(np.floor(_direction(arc_J) * radius).astype(np.int64), axis=0)
        toward_J = np.arctan2(candidate_JC[:, 0], candidate_JC[:, 1])
        self.radians_H = np.concatenate([np.radians(np.arange(-180, 180)), toward_J])
        # Which way the half turn goes decides some roundings.
        reverse_H = self.radians_H + np.where(self.radians_H < 0, math.pi, -math.pi)
        self.advance_HC = _direction(self.radians_H) * (length + 2 * margin)  # pivot to next pivot
        self.length_HC = _direction(self.radians_H) * length  # tail of a seed to its head
        self.recede_HC = _direction(reverse_H) * radius  # head of a seed to its pivot

        turn_HJ = np.abs(self.radians_H[:, None] - toward_J)
        turn_HJ = params.continuity * np.minimum(turn_HJ, 2 * math.pi - turn_HJ)
        weight_HJ = np.where(turn_HJ < math.pi / 2, np.cos(turn_HJ) ** 2, 0) / 255
        # Only candidates that some turn allows, in the same order as before.
        kept_HJ = np.argsort(weight_HJ == 0, axis=1, kind="stable")
        kept_HJ = kept_HJ[:, : np.count_nonzero(weight_HJ, axis=1).max()]
        self.weight_HJ = np.take_along_axis(weight_HJ, kept_HJ, axis=1)
        self.candidate_HJ = NUM_DEGREES + kept_HJ
        self.offset_H = np.concatenate([np.zeros(NUM_DEGREES, int), self.flat(candidate_JC)])
        self.offset_HJ = self.offset_H[self.candidate_HJ]
        self.disc = self.flat(_disc(margin)).tolist()

        # A seed is drawn forwards from its tail, any other paddle backwards from its tip.
        drawn_H = np.concatenate([self.radians_H[:NUM_DEGREES], reverse_H[NUM_DEGREES:]])
        lines, masks = paddle_rasters(params, margin, drawn_H)
        self.line = self._raster(lines, lines > 0)
        self.mask = self._raster(masks, masks > 0)
        # Per mask value the least occupancy that overlaps it; only the core can overlap at all.
        share = np.arange(256) / 255
        limit = np.count_nonzero(share[:, None] + share < OVERLAP, axis=1)
        core, value_HQ = self._raster(masks, limit[masks] < 256)
        self.core = _Raster(core, limit[value_HQ].astype(np.uint8))
        self._set_seed_rules(masks[:NUM_DEGREES], half=radius)

    def flat(self, offset_NC: IntArray) -> IntArray:
        """Offsets (y, x) as differences of pixels."""
        return offset_NC[..., 0] * self.side + offset_NC[..., 1]

    def pixel(self, point_NC: IntArray) -> IntArray:
        return self.flat(point_NC + self.border)

    def point(self, pixel_N: IntArray) -> IntArray:
        return np.stack(np.divmod(pixel_N, self.side), axis=-1) - self.border

    def window(self, maps: NDArray[Any]) -> NDArray[Any]:
        """The maps without their border, [N, R, R]."""
        inner = slice(self.border, self.border + self.params.resolution)
        return maps.reshape(-1, self.side, self.side)[:, inner, inner]

    def _raster(self, tiles: ByteArray, chosen: BoolArray) -> _Raster:
        length = int(np.count_nonzero(chosen, axis=(1, 2)).max())
        pixels = [self.flat(np.argwhere(c) - tiles.shape[1] // 2) for c in chosen]
        values = [tile[c] for tile, c in zip(tiles, chosen, strict=True)]
        return _Raster(
            np.stack([np.resize(p, length) for p in pixels]),
            np.stack([np.resize(v, length) for v in values]),
        )

    def _set_seed_rules(self, masks: ByteArray, half: int) -> None:
        """Footprints of seeds, the usable degrees, and where a target's first seed may lie.

        The original lays the mask one pixel below and right of its place when it looks for free
        pixels. Its dilation sets what lies outside to the most negative number; a footprint that
        can lie wholly outside thus makes the search end with "no free pixel", wherever it is. So a
        degree is usable only if the footprint of each corner pixel reaches into the window.
        """
        low = 2 * self.params.seed_distance
        high = self.params.resolution - 1 - low
        corners = np.array([(1, 1), (1, -1), (-1, 1), (-1, -1)])
        footprints = []
        self.usable_H = np.zeros(NUM_DEGREES, np.bool_)
        # A rectangle, since the frame is far away and only the distance to the borders counts.
        self.first_HC = np.zeros((NUM_DEGREES, 2), np.int64)
        self.first_size_HC = np.zeros((NUM_DEGREES, 2), np.int64)
        for heading, mask in enumerate(masks):
            offset_QC = np.argwhere(mask == 255) - mask.shape[0] // 2 + 1
            offset_QC = offset_QC[(np.abs(offset_QC) <= half).all(axis=1)]
            footprints.append(self.flat(offset_QC))
            inside = (offset_QC[:, None] * corners >= 0).all(axis=2)
            self.usable_H[heading] = inside.any(axis=0).all()
            if self.usable_H[heading]:
                self.first_HC[heading] = low - offset_QC.min(axis=0)
                size_C = high - offset_QC.max(axis=0) - self.first_HC[heading] + 1
                self.first_size_HC[heading] = np.maximum(size_C, 0)
        length = max(len(footprint) for footprint in footprints)
        self.footprint_HQ = np.stack([np.resize(footprint, length) for footprint in footprints])
        self.possible_H: BoolArray = self.first_size_HC.min(axis=1) > 0
        if not self.possible_H.any():
            raise ValueError(
                f"pathfinder: a target contour finds no place for its seed: {self.params}"
            )


@lru_cache(maxsize=16)
def _tables(params: PathfinderParams, margin: int) -> _Tables:
    return _Tables(params, margin)


def _direction(radians_H: FloatArray) -> FloatArray:
    return np.stack([np.sin(radians_H), np.cos(radians_H)], axis=1)


def _disc(radius: int) -> IntArray:
    y, x = np.ogrid[-radius : radius + 1, -radius : radius + 1]
    return np.argwhere(y * y + x * x <= radius * radius) - radius


def _move(point_NC: IntArray, shift_NC: FloatArray) -> IntArray:
    """Both coordinates are rounded up, as in the original."""
    return np.ceil(point_NC + shift_NC).astype(np.int64)


def paddle_rasters(
    params: PathfinderParams, margin: int, radians_H: FloatArray
) -> tuple[ByteArray, ByteArray]:
    """Line and mask of a paddle for each heading, each [H, side, side]; it starts at the centre."""
    from PIL import Image, ImageDraw

    reach = params.paddle_length + math.ceil(params.thickness) + margin
    centre, swell = reach * SUPERSAMPLING, margin * SUPERSAMPLING
    width = round(params.thickness * SUPERSAMPLING)
    shift_HC = _direction(radians_H) * (params.paddle_length * SUPERSAMPLING)
    lines = np.empty((len(radians_H), 2 * centre + 1, 2 * centre + 1), np.uint8)
    for line, (y, x) in zip(lines, _move(np.array(centre), shift_HC).tolist(), strict=True):
        image = Image.new("L", line.shape)
        ImageDraw.Draw(image).line([(centre, centre), (x, y)], fill=255, width=width)
        line[:] = np.asarray(image)
    padded = np.pad(lines, ((0, 0), (swell, swell), (swell, swell)))
    masks = np.zeros_like(lines)
    for y, x in (_disc(swell) + swell).tolist():
        shifted = padded[:, y : y + lines.shape[1], x : x + lines.shape[2]]
        np.maximum(masks, shifted, out=masks)
    size = (2 * reach + 1, 2 * reach + 1)
    return _shrink(lines, size), _shrink(masks, size)


def _shrink(canvases: ByteArray, size: tuple[int, int]) -> ByteArray:
    from PIL import Image

    lanczos = Image.Resampling.LANCZOS
    return np.stack([np.asarray(Image.fromarray(c).resize(size, lanczos)) for c in canvases])


@lru_cache(maxsize=4096)
def _marker(radius: float, above: int, below: int, left: int, right: int) -> ByteArray:
    """A marker on the rectangle that reaches so many pixels from its centre.

    Where the window's borders are near they must be the rectangle's: they cut the filter off.
    """
    y, x = np.ogrid[: (above + below + 1) * SUPERSAMPLING, : (left + right + 1) * SUPERSAMPLING]
    y, x = y - above * SUPERSAMPLING, x - left * SUPERSAMPLING
    disc = np.where(y * y + x * x <= (radius * SUPERSAMPLING) ** 2, 255, 0).astype(np.uint8)
    return _shrink(disc[None], (left + right + 1, above + below + 1))[0]


def _stamp(maps: ByteArray, pixel_N: IntArray, raster: _Raster, heading_N: IntArray) -> None:
    """Compose rasters into maps by maximum; the pixels must lie on different maps."""
    where_NQ = pixel_N[:, None] + raster.pixel_HQ[heading_N]
    flat = maps.reshape(-1)
    flat[where_NQ] = np.maximum(flat.take(where_NQ), raster.value_HQ[heading_N])


class _Contours(NamedTuple):
    """Contours in the making: a map's number for each row, and one or two contours on the map."""

    map_N: IntArray
    pixel_NSP: IntArray  # start of each paddle; tail of the first, tip of the others
    heading_NSP: IntArray
    pivot_NSC: IntArray

    @classmethod
    def blank(cls, map_N: IntArray, num_contours: int, num_paddles: int) -> _Contours:
        shape = (len(map_N), num_contours, num_paddles)
        pivot_NSC = np.zeros((*shape[:2], 2), np.int64)
        return cls(map_N, np.zeros(shape, np.int64), np.zeros(shape, np.int64), pivot_NSC)


def _set_seeds(
    tables: _Tables, contours: _Contours, contour: int, tail_NC: IntArray, heading_N: IntArray
) -> IntArray:
    """Make these the first paddles; returns their heads."""
    head_NC = _move(tail_NC, tables.length_HC[heading_N])
    contours.pixel_NSP[:, contour, 0] = tables.pixel(tail_NC)
    contours.heading_NSP[:, contour, 0] = heading_N
    contours.pivot_NSC[:, contour] = _move(head_NC, tables.recede_HC[heading_N])
    return head_NC


def _grow(
    tables: _Tables, maps: ByteArray, contours: _Contours, stream_N: StreamArray, place_N: IntArray
) -> IntArray:
    """Extend contours in turn by a paddle each until they are complete or one finds no room.

    Returns the rows that are complete. A paddle enters the occupancy when its successor is down.
    """
    base_N = contours.map_N * maps.shape[1]
    alive = np.arange(len(base_N))
    num_contours, num_paddles = contours.pixel_NSP.shape[1:]
    for step in range(num_contours * (num_paddles - 1)):
        if not alive.size:
            break
        last, contour = divmod(step, num_contours)
        place_N3 = place_N[alive, None] + step * PADDLE_TRIES + np.arange(PADDLE_TRIES)
        draw_N3 = _uniform(stream_N[alive, None], place_N3)
        heading_N = contours.heading_NSP[alive, contour, last]
        pivot_NC = _move(contours.pivot_NSC[alive, contour], tables.advance_HC[heading_N])
        centre_N = base_N[alive] + tables.pixel(pivot_NC)
        found, tip_N, next_N = _next_paddles(tables, maps, centre_N, heading_N, draw_N3)
        alive = alive[found]
        last_N = base_N[alive] + contours.pixel_NSP[alive, contour, last]
        _stamp(maps, last_N, tables.mask, heading_N[found])
        contours.pivot_NSC[alive, contour] = pivot_NC[found]
        contours.pixel_NSP[alive, contour, last + 1] = tip_N[found] - base_N[alive]
        contours.heading_NSP[alive, contour, last + 1] = next_N[found]
    return alive


def _next_paddles(
    tables: _Tables, maps: ByteArray, centre_N: IntArray, heading_N: IntArray, draw_N3: FloatArray
) -> tuple[BoolArray, IntArray, IntArray]:
    """Look for a paddle among the candidates around each centre: found or not, tip, heading."""
    flat = maps.reshape(-1)
    around_NJ = centre_N[:, None] + tables.offset_HJ[heading_N]
    dilated_NJ = flat.take(around_NJ)
    for offset in tables.disc:
        np.maximum(dilated_NJ, flat.take(around_NJ + offset), out=dilated_NJ)
    sum_NJ = np.cumsum(tables.weight_HJ[heading_N] * (255 - dilated_NJ), axis=1)

    found_N = np.zeros(len(centre_N), np.bool_)
    tip_N, next_N = np.zeros_like(centre_N), np.zeros_like(centre_N)
    rows = np.flatnonzero(sum_NJ[:, -1] >= MIN_TOTAL_WEIGHT)
    for attempt in range(PADDLE_TRIES):
        level_N = draw_N3[rows, attempt] * sum_NJ[rows, -1]
        slot_N = np.count_nonzero(sum_NJ[rows] <= level_N[:, None], axis=1)
        new_N = tables.candidate_HJ[heading_N[rows], slot_N]
        next_N[rows] = new_N
        tip_N[rows] = centre_N[rows] + tables.offset_H[new_N]
        occupied_NQ = flat.take(tip_N[rows, None] + tables.core.pixel_HQ[new_N])
        overlap_N = (occupied_NQ >= tables.core.value_HQ[new_N]).any(axis=1)
        found_N[rows[~overlap_N]] = True
        rows = rows[overlap_N]
    return found_N, tip_N, next_N


def _target_pairs(tables: _Tables, stream_N: StreamArray) -> tuple[IntArray, IntArray, IntArray]:
    """Draw both target contours of each picture, again and again until they succeed.

    Returns pixels and headings, both [N, S, P], and the number of draws. Of the attempts that run
    side by side the lowest number counts, not the one that ends first: that is the first success.
    """
    num_paddles = tables.params.num_paddles
    num_places = 5 + 2 * PADDLE_TRIES * (num_paddles - 1)
    num_maps = max(64, MAP_BYTES // len(tables.empty))
    maps = np.empty((num_maps, len(tables.empty)), np.uint8)
    pixel_NSP = np.empty((len(stream_N), 2, num_paddles), np.int64)
    heading_NSP = np.empty_like(pixel_NSP)
    draws_N = np.zeros(len(stream_N), np.int64)
    done, open_N = 0, np.flatnonzero(draws_N == 0)
    while open_N.size:
        if done > MAX_PAIR_DRAWS:
            raise ValueError(
                f"pathfinder: num_paddles={num_paddles} at resolution={tables.params.resolution}: "
                f"no room for two such contours in {done} draws; take fewer paddles"
            )
        # As many attempts as fill the maps, but not many more than have been needed so far.
        filling = num_maps * NUM_DEGREES / np.count_nonzero(tables.possible_H) / len(open_N)
        width = max(1, min(int(filling), max(4, done)))
        place_W = _FIRST_PAIR + (done + np.arange(width)) * num_places
        first_NW = _below(_uniform(stream_N[open_N, None], place_W), NUM_DEGREES)
        row_A, attempt_A = np.nonzero(tables.possible_H[first_NW])
        for low in range(0, len(row_A), num_maps):
            row, attempt = row_A[low : low + num_maps], attempt_A[low : low + num_maps]
            contours, complete = _attempt_pairs(
                tables, maps, first_NW[row, attempt], stream_N[open_N[row]], place_W[attempt]
            )
            for lane in complete.tolist():  # in the order of rows and attempts
                picture = open_N[row[lane]]
                if not draws_N[picture]:
                    draws_N[picture] = done + attempt[lane] + 1
                    pixel_NSP[picture] = contours.pixel_NSP[lane]
                    heading_NSP[picture] = contours.heading_NSP[lane]
        open_N = np.flatnonzero(draws_N == 0)
        done += width
    return pixel_NSP, heading_NSP, draws_N


def _attempt_pairs(
    tables: _Tables,
    maps: ByteArray,
    first_N: IntArray,
    stream_N: StreamArray,
    place_N: IntArray,
) -> tuple[_Contours, IntArray]:
    """One attempt for each of these first headings, which must be possible ones."""
    count = len(first_N)
    maps[:count] = tables.empty
    contours = _Contours.blank(np.arange(count), 2, tables.params.num_paddles)
    draw_N4 = _uniform(stream_N[:, None], place_N[:, None] + np.arange(1, 5))
    tail_NC = tables.first_HC[first_N] + _below(draw_N4[:, :2], tables.first_size_HC[first_N])
    _set_seeds(tables, contours, 0, tail_NC, first_N)
    second_N, away_N = _below(draw_N4[:, 2:], NUM_DEGREES).T
    away_NC = tables.params.seed_distance * _direction(np.radians(away_N))
    tail_NC = np.rint(tail_NC + away_NC).astype(np.int64)
    _set_seeds(tables, contours, 1, tail_NC, second_N)
    return contours, _grow(tables, maps, contours, stream_N, place_N + 5)


def _distractors(
    tables: _Tables, maps: ByteArray, stream_N: StreamArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Add distractors to the occupancy of each picture.

    Returns pixels and headings of their paddles, both [N, K, P], and how many there are.
    """
    params = tables.params
    num_tries = params.num_distractors * DISTRACTOR_TRIES
    seed_places = SEED_TRIES * (BLIND_DRAWS + 2)
    num_places = seed_places + PADDLE_TRIES * (params.paddles_per_distractor - 1)
    shape = (len(stream_N), params.num_distractors, params.paddles_per_distractor)
    pixel_NKP, heading_NKP = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    placed_N = np.zeros(len(stream_N), np.int64)

    # Tries at unusable degrees fail at once; for each number, the next try at a usable degree.
    place_T = _FIRST_DISTRACTOR + np.arange(num_tries) * num_places
    first_NT = _below(_uniform(stream_N[:, None], place_T), NUM_DEGREES)
    next_NT = np.full((len(stream_N), num_tries + 1), num_tries)
    next_NT[:, :-1] = np.where(tables.usable_H[first_NT], np.arange(num_tries), num_tries)
    next_NT = np.minimum.accumulate(next_NT[:, ::-1], axis=1)[:, ::-1]

    try_N = next_NT[:, 0].copy()
    while (open_N := np.flatnonzero(try_N < num_tries)).size:
        number = try_N[open_N]
        before = maps[open_N]
        contours = _Contours.blank(open_N, 1, params.paddles_per_distractor)
        # Unlike elsewhere what lies outside does not count when a seed looks for free pixels.
        blocked = (before > FREE_MAX) & tables.inside
        found_N = _seed_distractors(
            tables, blocked, contours, first_NT[open_N, number], stream_N[open_N], place_T[number]
        )
        blocked_share_N = np.count_nonzero(blocked, axis=1) / params.resolution**2
        rows = np.flatnonzero(found_N & (1 - blocked_share_N >= MIN_FREE_SHARE))
        contours = _Contours(*(array[rows] for array in contours))
        place_N = place_T[number[rows]] + seed_places
        done = _grow(tables, maps, contours, stream_N[open_N[rows]], place_N)

        won_N = np.zeros(len(open_N), np.bool_)
        won_N[rows[done]] = True
        maps[open_N[~won_N]] = before[~won_N]
        picture_N = open_N[rows[done]]
        pixel_NP, heading_NP = contours.pixel_NSP[done, 0], contours.heading_NSP[done, 0]
        last_N = picture_N * maps.shape[1] + pixel_NP[:, -1]
        _stamp(maps, last_N, tables.mask, heading_NP[:, -1])
        pixel_NKP[picture_N, placed_N[picture_N]] = pixel_NP
        heading_NKP[picture_N, placed_N[picture_N]] = heading_NP
        placed_N[picture_N] += 1
        # A success ends the tries at this distractor.
        following = (number // DISTRACTOR_TRIES + 1) * DISTRACTOR_TRIES
        try_N[open_N] = next_NT[open_N, np.where(won_N, following, number + 1)]
    return pixel_NKP, heading_NKP, placed_N


def _seed_distractors(
    tables: _Tables,
    blocked: BoolArray,
    contours: _Contours,
    heading_N: IntArray,
    stream_N: StreamArray,
    place_N: IntArray,
) -> BoolArray:
    """Set seeds at free pixels, at the given headings first; returns the rows that got one.

    A seed whose head or pivot lies outside gets another heading, as in the original.
    """
    resolution = tables.params.resolution
    flat = blocked.reshape(-1)
    found_N = np.zeros(len(heading_N), np.bool_)
    rows = np.arange(len(heading_N))
    for attempt in range(SEED_TRIES):
        place_NB = place_N[rows, None] + attempt * (BLIND_DRAWS + 2) + np.arange(BLIND_DRAWS + 2)
        draw_NB = _uniform(stream_N[rows, None], place_NB)
        if attempt:
            heading_N = _below(draw_NB[:, 0], NUM_DEGREES)
            usable_N = tables.usable_H[heading_N]
            rows, heading_N, draw_NB = rows[usable_N], heading_N[usable_N], draw_NB[usable_N]
        # Blind draws hit each free pixel with the same chance; the first hit is as good as a draw
        # from the list of free pixels, which is made only where there is no hit.
        spot_NB = _below(draw_NB[:, 1:-1], resolution**2)
        point_NBC = np.stack(np.divmod(spot_NB, resolution), axis=-1)
        pixel_NB = (rows * blocked.shape[1])[:, None] + tables.pixel(point_NBC)
        footprint_NQ = tables.footprint_HQ[heading_N]
        free_NB = ~flat.take(pixel_NB[:, :, None] + footprint_NQ[:, None]).any(axis=2)
        tail_NC = point_NBC[np.arange(len(rows)), free_NB.argmax(axis=1)]
        hit_N = free_NB.any(axis=1)
        for row in np.flatnonzero(~hit_N).tolist():
            free_FC = _free_points(tables, blocked[rows[row]], footprint_NQ[row])
            if len(free_FC):
                hit_N[row] = True
                tail_NC[row] = free_FC[int(draw_NB[row, -1] * len(free_FC))]
        rows, tail_NC, heading_N = rows[hit_N], tail_NC[hit_N], heading_N[hit_N]

        seeds = _Contours.blank(rows, 1, 1)
        head_NC = _set_seeds(tables, seeds, 0, tail_NC, heading_N)
        ends_N4 = np.concatenate([head_NC, seeds.pivot_NSC[:, 0]], axis=1)
        inside_N = ((ends_N4 >= 0) & (ends_N4 < resolution)).all(axis=1)
        placed = rows[inside_N]
        contours.pixel_NSP[placed, :, 0] = seeds.pixel_NSP[inside_N, :, 0]
        contours.heading_NSP[placed, :, 0] = seeds.heading_NSP[inside_N, :, 0]
        contours.pivot_NSC[placed] = seeds.pivot_NSC[inside_N]
        found_N[placed] = True
        rows = rows[~inside_N]
        if not rows.size:
            break
    return found_N


def _free_points(tables: _Tables, blocked: BoolArray, footprint_Q: IntArray) -> IntArray:
    """All points (y, x) of the window whose footprint is free."""
    hit = np.zeros_like(blocked)
    for offset in np.unique(footprint_Q).tolist():
        hit |= np.roll(blocked, -offset)
    return np.argwhere(~tables.window(hit)[0])


def _draw(
    tables: _Tables,
    stream_N: StreamArray,
    marked_N: IntArray,
    pictures: Pictures,
    index_N: IntArray,
) -> None:
    """Make pictures of one margin and write them to the rows `index_N`."""
    pixel_NSP, heading_NSP, pictures.pair_draws_N[index_N] = _target_pairs(tables, stream_N)
    origin_NSC, terminal_NSC = tables.point(pixel_NSP[..., 0]), tables.point(pixel_NSP[..., -1])
    row_N = np.arange(len(index_N))
    other_N = np.where(pictures.labels_N[index_N] == 1, marked_N, 1 - marked_N)
    marker_N2C = np.stack([origin_NSC[row_N, marked_N], terminal_NSC[row_N, other_N]], axis=1)
    pictures.markers_N2C[index_N] = marker_N2C
    pictures.origins_NSC[index_N] = origin_NSC
    pictures.terminals_NSC[index_N] = terminal_NSC
    pictures.headings_NSP[index_N] = np.degrees(tables.radians_H[heading_NSP])

    step = max(16, MAP_BYTES // len(tables.empty))
    for part in (slice(low, low + step) for low in range(0, len(index_N), step)):
        base_N = np.arange(len(index_N[part])) * len(tables.empty)
        occupancy = np.tile(tables.empty, (len(base_N), 1))
        targets, others = np.zeros_like(occupancy), np.zeros_like(occupancy)
        for contour, paddle in np.ndindex(pixel_NSP.shape[1:]):
            pixel_N = base_N + pixel_NSP[part, contour, paddle]
            heading_N = heading_NSP[part, contour, paddle]
            _stamp(targets, pixel_N, tables.line, heading_N)
            # As in the original the last paddle of the first contour stays out of the occupancy.
            if (contour, paddle) != (0, tables.params.num_paddles - 1):
                _stamp(occupancy, pixel_N, tables.mask, heading_N)
        pixel_NKP, heading_NKP, placed_N = _distractors(tables, occupancy, stream_N[part])
        for distractor, paddle in np.ndindex(pixel_NKP.shape[1:]):
            there = np.flatnonzero(placed_N > distractor)
            pixel_N = base_N[there] + pixel_NKP[there, distractor, paddle]
            _stamp(others, pixel_N, tables.line, heading_NKP[there, distractor, paddle])
        pictures.num_distractors_N[index_N[part]] = placed_N
        windows = (tables.window(targets), tables.window(others))
        images = (
            _compose(tables.params, *three)
            for three in zip(*windows, marker_N2C[part], strict=True)
        )
        for index, image_RR in zip(index_N[part].tolist(), images, strict=True):
            pictures.images_NRR[index] = image_RR


def _compose(
    params: PathfinderParams, target_RR: ByteArray, other_RR: ByteArray, marker_2C: IntArray
) -> ByteArray:
    """Weigh targets and distractors by their contrasts, add markers, stretch to 0 .. 255."""
    # Single precision here decides which halves are rounded up, as in the original's files.
    byte = np.arange(256)
    target = (byte * (params.snake_contrast * params.paddle_contrast / 255)).astype(np.float32)
    other = (byte * (params.snake_contrast / 255)).astype(np.float32)
    # The ground is 0 and a marker has a pixel of 1, so only brighter paddles matter here.
    high = max(1.0, float(target[target_RR.max()]), float(other[other_RR.max()]))

    def grey(level: NDArray[np.floating]) -> ByteArray:
        return np.minimum(level.astype(np.float64) * (255 / high) + 0.5, 255).astype(np.uint8)

    image_RR = np.maximum(grey(target)[target_RR], grey(other)[other_RR])
    marker_grey = grey(byte / 255)
    reach = math.ceil(params.marker_radius) + 5  # the disc and the filter around it
    last = params.resolution - 1
    for y, x in marker_2C.tolist():
        above, below = min(reach, y), min(reach, last - y)
        left, right = min(reach, x), min(reach, last - x)
        disc = marker_grey[_marker(params.marker_radius, above, below, left, right)]
        area = image_RR[y - above : y + below + 1, x - left : x + right + 1]
        np.maximum(area, disc, out=area)
    return image_RR
