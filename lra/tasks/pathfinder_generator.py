"""Generator of Pathfinder pictures: two dashed curves among distractors; do the markers share one?

Follows the distribution of the original program (https://github.com/drewlinsley/pathfinder,
commit ab9c130, Linsley et al. 2018), its roundings and border effects included, with the settings
of the Long Range Arena paper. What differs is the work done: everything that depends on a paddle's
heading alone is tabulated once, the occupancy is looked up only around a paddle's tip instead of
being dilated as a whole, and many attempts advance together, one paddle at a time.

Conventions: points are (y, x), y down; a heading t points along (sin t, cos t). The occupancy and
all rasters are bytes, 255 = 1.0. Maps have a border of `pad` pixels, so that no index leaves them.

Random numbers: each picture has its own SplitMix64 stream, and each choice has a fixed place in it,
given by the number of the attempt and the paddle. A picture therefore depends on the seed, its
index and the parameters, never on which pictures or attempts are computed beside it.

Shapes: N pictures or attempts, R resolution, S = 2 target contours, P paddles of a contour,
H headings (360 whole degrees, then one per candidate offset), J candidates of a heading,
M pixels of a disc, Q pixels of a raster, C coordinates (y, x), K distractors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

ByteArray = NDArray[np.uint8]
IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
KeyArray = NDArray[np.uint64]

NUM_PADDLES = {"easy": 6, "intermediate": 9, "hard": 14}

SUPERSAMPLING = 2
NUM_DEGREES = 360
SEED_TRIES = 3
PADDLE_TRIES = 3
DISTRACTOR_TRIES = 5
MIN_TOTAL_WEIGHT = 1e-4
FREE_MAX = 76  # a pixel is free up to an occupancy of 0.3
OVERLAP_MIN = 1.8  # occupancy + mask, as fractions
CORE_MIN = 204  # a mask's pixels below this value can never reach the overlap
MIN_FREE_SHARE = 0.01

# Not part of the distribution: a seed's pixel is drawn blindly this often before the free pixels
# are listed, and a parameter set that needs more pair draws than this is taken for impossible.
BLIND_DRAWS = 16
MAX_PAIR_DRAWS = 1_000_000

# Memory of the maps of all attempts that advance together, and the number of pictures in work.
MAP_BYTES = 8 << 20
CHUNK = 256


@dataclass(frozen=True)
class PathfinderParams:
    """What shapes a picture; lengths in pixels. `params_for` gives the sets of the benchmark.

    Raises ValueError, naming the field, for values the generator cannot honour.
    """

    resolution: int
    padding: int  # width of the frame that stays free of paddles
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
        for name in ("padding", "seed_distance", "paddle_length", "num_paddles"):
            _require(self, name, getattr(self, name) >= 1, "at least 1")
        for name in ("marker_radius", "continuity", "snake_contrast", "paddle_contrast"):
            _require(self, name, getattr(self, name) > 0, "above 0")
        _require(self, "num_distractors", self.num_distractors >= 0, "at least 0")
        _require(
            self,
            "paddles_per_distractor",
            self.paddles_per_distractor >= (self.num_distractors > 0),
            "at least 1 where there are distractors",
        )
        width = self.thickness * SUPERSAMPLING
        whole = width >= 1 and width == round(width)
        _require(self, "thickness", whole, f"a positive multiple of 1/{SUPERSAMPLING}")
        margins = bool(self.margins) and min(self.margins) >= 1
        _require(self, "margins", margins, "one or more integers of at least 1")
        # The two seeds are never checked against the window: they have to lie inside it by themselves.
        reach = self.paddle_length + max(self.margins) + 3
        _require(self, "seed_distance", self.seed_distance >= reach, f"at least {reach}")
        side = 4 * self.seed_distance + 1
        _require(self, "resolution", self.resolution >= side, f"at least {side}")


def _require(params: PathfinderParams, name: str, ok: bool, expected: str) -> None:
    if not ok:
        raise ValueError(f"pathfinder: {name}={getattr(params, name)!r}, must be {expected}")


# Columns: padding, seed distance, paddle length, thickness, margins, marker radius, continuity,
# snake contrast, paddle contrast, and the budget of distractor paddles.
_SETTINGS: dict[int, tuple[int, int, int, float, tuple[int, ...], float, float, float, float, int]]
_SETTINGS = {
    32: (1, 7, 2, 0.5, (1,), 1.5, 1.0, 2.0, 0.75, 20),
    64: (1, 12, 5, 1.0, (1,), 2.5, 1.8, 0.8, 1.0, 22),
    128: (1, 20, 5, 1.5, (2, 3), 3.0, 1.8, 0.9, 1.0, 35),
    256: (22, 27, 5, 2.0, (3,), 5.0, 1.8, 1.0, 1.0, 30),
}


def params_for(
    resolution: int, difficulty: str, num_distractors: int | None = None
) -> PathfinderParams:
    """Settings of one picture size and level.

    `num_distractors` defaults to the size's budget of distractor paddles divided by the paddles of
    one distractor. Raises ValueError for an unknown size or level.
    """
    if resolution not in _SETTINGS:
        raise ValueError(f"pathfinder: resolution={resolution!r}, must be one of {list(_SETTINGS)}")
    if difficulty not in NUM_PADDLES:
        raise ValueError(
            f"pathfinder: difficulty={difficulty!r}, must be one of {list(NUM_PADDLES)}"
        )
    *settings, budget = _SETTINGS[resolution]
    num_paddles = NUM_PADDLES[difficulty]
    length = num_paddles // 3
    count = budget // length if num_distractors is None else num_distractors
    return PathfinderParams(resolution, *settings, num_paddles, length, count)  # type: ignore[arg-type]


@dataclass
class Pictures:
    """Pictures with their truth, one row for each; `concatenate` joins parts.

    Contour 0 starts in the middle of the picture, contour 1 at a fixed distance from there. An
    origin is the end where a contour starts, a terminal the other. Marker 0 is always at an origin.
    """

    images_NRR: ByteArray
    labels_N: ByteArray  # 1: the markers lie on the same contour
    markers_N2C: NDArray[np.int16]
    origins_NSC: NDArray[np.int16]
    terminals_NSC: NDArray[np.int16]
    headings_NSP: NDArray[np.float32]  # degrees, of each paddle of the target contours
    margins_N: ByteArray
    num_distractors_N: ByteArray  # placed; those that find no room are missing
    pair_draws_N: IntArray  # attempts at the target pair, the successful one included

    @staticmethod
    def concatenate(parts: list[Pictures]) -> Pictures:
        """Join blocks in the order given."""
        names = [field.name for field in fields(Pictures)]
        return Pictures(*(np.concatenate([getattr(p, name) for p in parts]) for name in names))


def generate(params: PathfinderParams, seed: int, start: int, count: int) -> Pictures:
    """Pictures start .. start + count - 1 of the endless row that `seed` stands for.

    Any division of the row into calls gives the same pictures. Raises ValueError for a negative
    seed, start or count, and where the parameters leave no room for the two target contours.
    """
    for name, value in (("seed", seed), ("start", start), ("count", count)):
        if not 0 <= value < 2**63:
            raise ValueError(f"pathfinder: {name}={value}, must be between 0 and 2**63 - 1")
    pictures = _blank_pictures(params, count)
    for low in range(0, count, CHUNK):
        index_N = np.arange(low, min(low + CHUNK, count))
        stream_N = _streams(seed, start + index_N)
        # Label, margin and the contour with the marker at its origin come first in each stream.
        draw_N3 = _uniform(stream_N[:, None], np.arange(3))
        label_N = (draw_N3[:, 0] < 0.5).astype(np.uint8)
        margin_N = np.array(params.margins)[(draw_N3[:, 1] * len(params.margins)).astype(int)]
        pictures.labels_N[index_N] = label_N
        pictures.margins_N[index_N] = margin_N
        for margin in sorted(set(params.margins)):
            rows = np.flatnonzero(margin_N == margin)
            if rows.size:
                marked_N = (draw_N3[rows, 2] * 2).astype(int)
                _draw(_tables(params, margin), stream_N[rows], marked_N, pictures, index_N[rows])
    return pictures


def _blank_pictures(params: PathfinderParams, count: int) -> Pictures:
    return Pictures(
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


# Random numbers ---------------------------------------------------------------------------------

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST_PAIR = 1 << 8  # where the draws of the pair attempts begin in a stream
_FIRST_DISTRACTOR = 1 << 48


def _mix(z: KeyArray) -> KeyArray:
    """The output function of SplitMix64 (Steele, Lea and Flood 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _streams(seed: int, index_N: IntArray) -> KeyArray:
    root = _mix(np.array([seed], np.uint64) + _GOLDEN)
    return _mix(root + index_N.astype(np.uint64) * _GOLDEN)


def _uniform(stream: KeyArray, place: IntArray) -> FloatArray:
    """Draw number `place` of each stream, in [0, 1); 52 bits, so that u * total < total."""
    bits = _mix(stream + (place + 1).astype(np.uint64) * _GOLDEN)
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


# Tables -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Tables:
    """All that depends on the heading of a paddle, for one parameter set and margin.

    A heading is a number: first the whole degrees -180 .. 179 of seeds, then the directions from a
    circle's centre to its candidates. Pixels are offsets in a flat map; short lists are filled up
    with entries that change nothing.
    """

    params: PathfinderParams
    margin: int
    pad: int
    side: int  # of a map
    radians_H: FloatArray
    advance_HC: FloatArray  # from a pivot to the next
    length_HC: FloatArray  # from a seed's tail to its head
    recede_HC: FloatArray  # from a seed's head to its pivot
    line_HQ: IntArray
    line_value_HQ: ByteArray
    mask_HQ: IntArray
    mask_value_HQ: ByteArray
    core_HQ: IntArray  # the part of the mask that can overlap at all
    core_value_HQ: FloatArray  # as a fraction: whether 459 / 255 reaches 1.8 is left to rounding
    candidate_HJ: IntArray  # heading of each candidate
    offset_H: IntArray  # from the centre to the candidate
    weight_HJ: FloatArray  # of the turn alone; divided by 255
    around_HJM: IntArray  # the disc around each candidate, from the centre
    footprint_HQ: IntArray  # pixels that must be free around a seed
    usable_H: BoolArray  # degrees at which the original ever finds a free pixel
    first_low_HC: IntArray  # where a first seed may lie: lowest point and
    first_size_HC: IntArray  # extent of a rectangle
    frame: ByteArray  # the empty map


def _move(point_NC: IntArray, shift_NC: FloatArray) -> IntArray:
    """Both coordinates are rounded up, as in the original."""
    return np.ceil(point_NC + shift_NC).astype(np.int64)


def _disc(radius: float) -> IntArray:
    """Offsets (y, x) within `radius` of the origin."""
    reach = int(radius)
    y, x = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    return np.argwhere(y * y + x * x <= radius * radius) - reach


def paddle_rasters(
    params: PathfinderParams, margin: int, radians_H: FloatArray
) -> tuple[ByteArray, ByteArray]:
    """Line and mask of a paddle for each heading, each [H, side, side]; the centre is its start."""
    from PIL import Image, ImageDraw

    scale = SUPERSAMPLING
    reach = params.paddle_length + math.ceil(params.thickness) + margin
    centre, side = reach * scale, 2 * reach + 1
    width = round(params.thickness * scale)
    unit_HC = np.stack([np.sin(radians_H), np.cos(radians_H)], axis=1)
    end_HC = _move(np.full((len(radians_H), 2), centre), unit_HC * (params.paddle_length * scale))

    large = np.empty((len(radians_H), 2 * centre + 1, 2 * centre + 1), np.uint8)
    for canvas, (y, x) in zip(large, end_HC.tolist(), strict=True):
        image = Image.new("L", canvas.shape)
        ImageDraw.Draw(image).line([(centre, centre), (x, y)], fill=255, width=width)
        canvas[:] = image
    swell = margin * scale
    padded = np.pad(large, ((0, 0), (swell, swell), (swell, swell)))
    swollen = np.zeros_like(large)
    for y, x in (_disc(swell) + swell).tolist():
        window = padded[:, y : y + large.shape[1], x : x + large.shape[2]]
        np.maximum(swollen, window, out=swollen)

    def shrink(canvases: ByteArray) -> ByteArray:
        images = (Image.fromarray(c).resize((side, side), Image.Resampling.LANCZOS) for c in canvases)
        return np.stack([np.asarray(image) for image in images])

    return shrink(large), shrink(swollen)


@lru_cache(maxsize=16)
def _tables(params: PathfinderParams, margin: int) -> _Tables:
    radius = params.paddle_length + margin
    reach = params.paddle_length + math.ceil(params.thickness) + margin
    # A pivot lies at most a margin and a rounding beyond a point inside the window.
    pad = max(reach, radius + 2 * margin + 3)
    side = params.resolution + 2 * pad

    # Candidates lie on the circle, a pixel of arc apart; the original truncates their coordinates.
    arc_J = np.radians(np.arange(0, 360, 360 / (2 * math.pi * radius)))
    circle_JC = np.stack([np.sin(arc_J), np.cos(arc_J)], axis=1) * radius
    candidate_JC = np.unique(np.floor(circle_JC).astype(np.int64), axis=0)
    direction_J = np.arctan2(candidate_JC[:, 0], candidate_JC[:, 1])
    radians_H = np.concatenate([np.radians(np.arange(-180, 180)), direction_J])
    # Which way the half turn goes decides some roundings.
    reverse_H = np.where(radians_H < 0, radians_H + math.pi, radians_H - math.pi)
    unit_HC = np.stack([np.sin(radians_H), np.cos(radians_H)], axis=1)
    back_HC = np.stack([np.sin(reverse_H), np.cos(reverse_H)], axis=1)

    # A seed is drawn forwards from its tail, any other paddle backwards from its tip.
    drawn_H = np.concatenate([radians_H[:NUM_DEGREES], reverse_H[NUM_DEGREES:]])
    lines, masks = paddle_rasters(params, margin, drawn_H)
    line_HQ, line_value_HQ = _pixel_lists(lines, lines > 0, side)
    mask_HQ, mask_value_HQ = _pixel_lists(masks, masks > 0, side)
    core_HQ, core_value_HQ = _pixel_lists(masks, masks >= CORE_MIN, side)

    turn_HJ = np.abs(radians_H[:, None] - direction_J)
    turn_HJ = params.continuity * np.minimum(turn_HJ, 2 * math.pi - turn_HJ)
    all_weight_HJ = np.where(turn_HJ < math.pi / 2, np.cos(turn_HJ) ** 2, 0) / 255
    order_HJ = np.argsort(all_weight_HJ == 0, axis=1, kind="stable")
    order_HJ = order_HJ[:, : np.count_nonzero(all_weight_HJ, axis=1).max()]
    offset_J = candidate_JC @ (side, 1)
    around_JM = offset_J[:, None] + _disc(margin) @ (side, 1)

    footprint_HQ, usable_H, first_low_HC, first_size_HC = _seed_rules(params, margin, masks, side)
    if not first_size_HC.all(axis=1).any():
        raise ValueError(f"pathfinder: no seed of a target contour fits, settings {params}")
    inner = pad + params.padding
    frame = np.full((side, side), 255, np.uint8)
    frame[inner:-inner, inner:-inner] = 0
    return _Tables(
        params=params,
        margin=margin,
        pad=pad,
        side=side,
        radians_H=radians_H,
        advance_HC=unit_HC * (params.paddle_length + 2 * margin),
        length_HC=unit_HC * params.paddle_length,
        recede_HC=back_HC * radius,
        line_HQ=line_HQ,
        line_value_HQ=line_value_HQ,
        mask_HQ=mask_HQ,
        mask_value_HQ=mask_value_HQ,
        core_HQ=core_HQ,
        core_value_HQ=core_value_HQ / 255,
        candidate_HJ=NUM_DEGREES + order_HJ,
        offset_H=np.concatenate([np.zeros(NUM_DEGREES, np.int64), offset_J]),
        weight_HJ=np.take_along_axis(all_weight_HJ, order_HJ, axis=1),
        around_HJM=around_JM[order_HJ],
        footprint_HQ=footprint_HQ,
        usable_H=usable_H,
        first_low_HC=first_low_HC,
        first_size_HC=first_size_HC,
        frame=frame.ravel(),
    )


def _pixel_lists(
    tiles: ByteArray, chosen: BoolArray, side: int
) -> tuple[IntArray, ByteArray]:
    """Flat offsets and values of the chosen pixels; repeats fill up, so that writing them is safe."""
    reach = tiles.shape[1] // 2
    length = np.count_nonzero(chosen, axis=(1, 2)).max()
    offset_HQ = [
        np.resize((np.argwhere(choice) - reach) @ (side, 1), length) for choice in chosen
    ]
    value_HQ = [
        np.resize(tile[choice], length) for tile, choice in zip(tiles, chosen, strict=True)
    ]
    return np.stack(offset_HQ), np.stack(value_HQ)


def _seed_rules(
    params: PathfinderParams, margin: int, masks: ByteArray, side: int
) -> tuple[IntArray, BoolArray, IntArray, IntArray]:
    """Footprints of seeds, the usable degrees, and where a first seed may lie.

    The original lays the paddle's mask one pixel below and right of its place when it looks for free
    pixels. Its dilation fills the outside with the most negative number; where a footprint can lie
    wholly outside, that number is the picture's minimum and the search ends with "no free pixel",
    wherever the rest is free. So a degree is usable only if the footprint of each corner pixel
    reaches into the window.
    """
    half = params.paddle_length + margin  # the footprint's window, around the pixel
    reach = masks.shape[1] // 2
    low, high = 2 * params.seed_distance, params.resolution - 2 * params.seed_distance - 1
    usable_H = np.zeros(NUM_DEGREES, np.bool_)
    first_low_HC = np.zeros((NUM_DEGREES, 2), np.int64)
    first_size_HC = np.zeros((NUM_DEGREES, 2), np.int64)
    footprints = []
    for heading in range(NUM_DEGREES):
        offset_QC = np.argwhere(masks[heading] == 255) - reach + 1
        offset_QC = offset_QC[(np.abs(offset_QC) <= half).all(axis=1)]
        footprints.append(offset_QC @ (side, 1))
        corners = np.array([(1, 1), (1, -1), (-1, 1), (-1, -1)])
        usable_H[heading] = (offset_QC[:, None] * corners >= 0).all(axis=2).any(axis=0).all()
        if usable_H[heading]:
            # All of the footprint has to lie in the central square, 2 seed distances from the borders.
            first_low_HC[heading] = low - offset_QC.min(axis=0)
            extent_C = high - offset_QC.max(axis=0) - first_low_HC[heading] + 1
            first_size_HC[heading] = np.maximum(extent_C, 0)
    length = max(len(pixels) for pixels in footprints)
    footprint_HQ = np.stack([np.resize(p, length) for p in footprints])  # repeats fill up
    return footprint_HQ, usable_H, first_low_HC, first_size_HC


@lru_cache(maxsize=4096)
def _marker(radius: float, above: int, below: int, left: int, right: int) -> ByteArray:
    """A marker's disc on the rectangle that reaches so many pixels from its centre.

    The sides are those of the window where they are near, because the filter is cut off there.
    """
    from PIL import Image

    y, x = np.ogrid[: (above + below + 1) * SUPERSAMPLING, : (left + right + 1) * SUPERSAMPLING]
    y, x = y - above * SUPERSAMPLING, x - left * SUPERSAMPLING
    disc = np.where(y * y + x * x <= (radius * SUPERSAMPLING) ** 2, 255, 0).astype(np.uint8)
    size = (left + right + 1, above + below + 1)
    return np.asarray(Image.fromarray(disc).resize(size, Image.Resampling.LANCZOS))


# Growing contours -------------------------------------------------------------------------------


def _flat(tables: _Tables, point_NC: IntArray) -> IntArray:
    return (point_NC[:, 0] + tables.pad) * tables.side + point_NC[:, 1] + tables.pad


def _points(tables: _Tables, pixel_N: IntArray) -> IntArray:
    y, x = np.divmod(pixel_N, tables.side)
    return np.stack([y, x], axis=-1) - tables.pad


def _stamp(maps: ByteArray, pixel_N: IntArray, offset_NQ: IntArray, value_NQ: ByteArray) -> None:
    """Compose rasters into the maps by maximum; no two of one call may be on the same map."""
    where_NQ = pixel_N[:, None] + offset_NQ
    flat = maps.reshape(-1)
    flat[where_NQ] = np.maximum(flat[where_NQ], value_NQ)


def _extend(
    tables: _Tables,
    maps: ByteArray,
    base_N: IntArray,
    pivot_NC: IntArray,
    heading_N: IntArray,
    draw_N3: FloatArray,
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Look for the next paddle of each contour, on the map that starts at `base_N`.

    Returns the rows that found one, and of these the new pivots, tips (in the maps) and headings.
    """
    flat = maps.reshape(-1)
    next_NC = _move(pivot_NC, tables.advance_HC[heading_N])
    centre_N = base_N + _flat(tables, next_NC)
    occupied_NJ = flat[centre_N[:, None, None] + tables.around_HJM[heading_N]].max(axis=2)
    sum_NJ = np.cumsum(tables.weight_HJ[heading_N] * (255 - occupied_NJ), axis=1)
    tip_N = np.zeros_like(heading_N)
    new_N = np.zeros_like(heading_N)
    found_N = np.zeros(len(heading_N), np.bool_)
    rows = np.flatnonzero(sum_NJ[:, -1] >= MIN_TOTAL_WEIGHT)
    for attempt in range(PADDLE_TRIES):
        level_N = draw_N3[rows, attempt] * sum_NJ[rows, -1]
        slot_N = np.count_nonzero(sum_NJ[rows] <= level_N[:, None], axis=1)
        new_N[rows] = tables.candidate_HJ[heading_N[rows], slot_N]
        tip_N[rows] = centre_N[rows] + tables.offset_H[new_N[rows]]
        touched_NQ = flat[tip_N[rows, None] + tables.core_HQ[new_N[rows]]]
        total_NQ = touched_NQ / 255 + tables.core_value_HQ[new_N[rows]]
        free_N = total_NQ.max(axis=1) < OVERLAP_MIN
        found_N[rows[free_N]] = True
        rows = rows[~free_N]
        if not rows.size:
            break
    found = np.flatnonzero(found_N)
    return found, next_NC[found], tip_N[found], new_N[found]


def _grow(
    tables: _Tables,
    maps: ByteArray,
    base_N: IntArray,
    pivot_NSC: IntArray,
    pixel_NSP: IntArray,
    heading_NSP: IntArray,
    stream_N: KeyArray,
    place_N: IntArray,
) -> IntArray:
    """Grow contours in turn from their seeds, the first paddle of each being there.

    Fills in the paddles of `pixel_NSP` and `heading_NSP` (pixels count from the start of `maps`),
    takes draws from `place_N` on, and returns the rows that became complete. A paddle enters the
    occupancy when its successor is down.
    """
    num_contours, num_paddles = pixel_NSP.shape[1:]
    alive = np.arange(len(base_N))
    for paddle in range(1, num_paddles):
        for contour in range(num_contours):
            first = ((paddle - 1) * num_contours + contour) * PADDLE_TRIES
            place_N3 = place_N[alive, None] + np.arange(first, first + PADDLE_TRIES)
            found, pivot_NC, tip_N, new_N = _extend(
                tables,
                maps,
                base_N[alive],
                pivot_NSC[alive, contour],
                heading_NSP[alive, contour, paddle - 1],
                _uniform(stream_N[alive, None], place_N3),
            )
            alive = alive[found]
            if not alive.size:
                return alive
            last = heading_NSP[alive, contour, paddle - 1]
            _stamp(
                maps,
                pixel_NSP[alive, contour, paddle - 1],
                tables.mask_HQ[last],
                tables.mask_value_HQ[last],
            )
            pivot_NSC[alive, contour] = pivot_NC
            pixel_NSP[alive, contour, paddle] = tip_N
            heading_NSP[alive, contour, paddle] = new_N
    return alive


def _target_pairs(tables: _Tables, stream_N: KeyArray) -> tuple[IntArray, IntArray, IntArray]:
    """Draw the target pair of each picture anew until it succeeds.

    Returns pixels and headings of the paddles, both [N, S, P], and the number of draws. Of the
    attempts that run side by side the one with the lowest number counts, not the one that ends first.
    """
    num_paddles = tables.params.num_paddles
    num_draws = 5 + 2 * PADDLE_TRIES * (num_paddles - 1)
    map_size = len(tables.frame)
    lanes = max(64, MAP_BYTES // map_size)
    maps = np.empty((lanes, map_size), np.uint8)
    pixel_NSP = np.empty((len(stream_N), 2, num_paddles), np.int64)
    heading_NSP = np.empty_like(pixel_NSP)
    draws_N = np.empty(len(stream_N), np.int64)
    possible_H = tables.first_size_HC.all(axis=1)
    wanted = lanes / np.count_nonzero(possible_H) * NUM_DEGREES

    open_N = np.arange(len(stream_N))
    done = 0
    while open_N.size:
        if done > MAX_PAIR_DRAWS:
            raise ValueError(
                f"pathfinder: num_paddles={num_paddles}, no room for two such contours found in "
                f"{done} draws at resolution={tables.params.resolution}"
            )
        # At most as many attempts at once as there have been: few are then made in vain.
        width = max(1, min(int(wanted / open_N.size), max(done, 8)))
        number = np.arange(done, done + width)
        place_W = _FIRST_PAIR + number * num_draws
        first_NW = (_uniform(stream_N[open_N, None], place_W) * NUM_DEGREES).astype(np.int64)
        row_A, column_A = np.nonzero(possible_H[first_NW])
        winner = np.full(len(open_N), -1)
        for low in range(0, len(row_A), lanes):
            row_L, column_L = row_A[low : low + lanes], column_A[low : low + lanes]
            grown = _attempt_pairs(
                tables,
                maps,
                stream_N[open_N[row_L]],
                place_W[column_L],
                first_NW[row_L, column_L],
            )
            # Rows and, within a row, attempts come in order: the first to be seen is the lowest.
            for lane, pixel_SP, heading_SP in grown:
                row = row_L[lane]
                if winner[row] < 0:
                    winner[row] = column_L[lane]
                    pixel_NSP[open_N[row]] = pixel_SP
                    heading_NSP[open_N[row]] = heading_SP
        won = winner >= 0
        draws_N[open_N[won]] = done + winner[won] + 1
        open_N = open_N[~won]
        done += width
    return pixel_NSP, heading_NSP, draws_N


def _attempt_pairs(
    tables: _Tables,
    maps: ByteArray,
    stream_N: KeyArray,
    place_N: IntArray,
    first_N: IntArray,
) -> Iterator[tuple[int, IntArray, IntArray]]:
    """Grow one pair per row from first headings that have a free pixel; yields what succeeded."""
    count = len(stream_N)
    maps[:count] = tables.frame
    base_N = np.arange(count) * maps.shape[1]
    draw_N4 = _uniform(stream_N[:, None], place_N[:, None] + np.arange(1, 5))
    heading_NSP = np.empty((count, 2, tables.params.num_paddles), np.int64)
    pixel_NSP = np.empty_like(heading_NSP)
    pivot_NSC = np.empty((count, 2, 2), np.int64)
    extent_NC = draw_N4[:, :2] * tables.first_size_HC[first_N]
    tail_NC = tables.first_low_HC[first_N] + extent_NC.astype(np.int64)
    second_N = (draw_N4[:, 2] * NUM_DEGREES).astype(np.int64)
    away_N = np.radians((draw_N4[:, 3] * 360).astype(np.int64))
    away_NC = tables.params.seed_distance * np.stack([np.sin(away_N), np.cos(away_N)], axis=1)
    for contour, heading_N in enumerate((first_N, second_N)):
        if contour == 1:
            tail_NC = np.rint(tail_NC + away_NC).astype(np.int64)
        heading_NSP[:, contour, 0] = heading_N
        pixel_NSP[:, contour, 0] = base_N + _flat(tables, tail_NC)
        head_NC = _move(tail_NC, tables.length_HC[heading_N])
        pivot_NSC[:, contour] = _move(head_NC, tables.recede_HC[heading_N])
    complete = _grow(
        tables, maps, base_N, pivot_NSC, pixel_NSP, heading_NSP, stream_N, place_N + 5
    )
    for lane in complete.tolist():
        yield lane, pixel_NSP[lane] - base_N[lane], heading_NSP[lane]


def _place_seeds(
    tables: _Tables,
    maps: ByteArray,
    rows_N: IntArray,
    heading_N: IntArray,
    stream_N: KeyArray,
    place_N: IntArray,
) -> tuple[BoolArray, IntArray, IntArray, IntArray]:
    """Seeds of distractors: found or not, tails, headings and pivots.

    The first heading is given; a seed whose head or pivot would lie outside gets another.
    """
    resolution = tables.params.resolution
    flat = maps.reshape(-1)
    heading_N = heading_N.copy()
    tail_NC = np.zeros((len(rows_N), 2), np.int64)
    pivot_NC = np.zeros((len(rows_N), 2), np.int64)
    found_N = np.zeros(len(rows_N), np.bool_)
    open_N = np.arange(len(rows_N))
    for attempt in range(SEED_TRIES):
        place_M = place_N[open_N, None] + attempt * (BLIND_DRAWS + 2) + np.arange(BLIND_DRAWS + 2)
        draw_NM = _uniform(stream_N[open_N, None], place_M)
        if attempt:
            heading_N[open_N] = (draw_NM[:, 0] * NUM_DEGREES).astype(np.int64)
            usable = tables.usable_H[heading_N[open_N]]
            open_N, draw_NM = open_N[usable], draw_NM[usable]
            if not open_N.size:
                break
        # A blind draw that hits a free pixel is a uniform draw among the free pixels.
        pixel_NB = (draw_NM[:, 1:-1] * resolution**2).astype(np.int64)
        point_NBC = np.stack(np.divmod(pixel_NB, resolution), axis=-1)
        map_NB = (point_NBC + tables.pad) @ (tables.side, 1)
        footprint_NQ = tables.footprint_HQ[heading_N[open_N]]
        where_NBQ = (rows_N[open_N] * maps.shape[1])[:, None, None] + map_NB[:, :, None]
        free_NB = flat[where_NBQ + footprint_NQ[:, None]].max(axis=2) <= FREE_MAX
        first_N = free_NB.argmax(axis=1)
        tail_NC[open_N] = point_NBC[np.arange(len(open_N)), first_N]
        seen_N = free_NB.any(axis=1)
        for slot in np.flatnonzero(~seen_N).tolist():
            row = open_N[slot]
            free = _free_pixels(tables, maps[rows_N[row]], footprint_NQ[slot])
            if free.size:
                seen_N[slot] = True
                pixel = free[int(draw_NM[slot, -1] * len(free))]
                tail_NC[row] = divmod(int(pixel), resolution)
        open_N = open_N[seen_N]
        head_NC = _move(tail_NC[open_N], tables.length_HC[heading_N[open_N]])
        pivot_NC[open_N] = _move(head_NC, tables.recede_HC[heading_N[open_N]])
        ends_N4 = np.concatenate([head_NC, pivot_NC[open_N]], axis=1)
        inside = ((ends_N4 >= 0) & (ends_N4 < resolution)).all(axis=1)
        found_N[open_N[inside]] = True
        open_N = open_N[~inside]
        if not open_N.size:
            break
    return found_N, tail_NC, heading_N, pivot_NC


def _free_pixels(tables: _Tables, occupancy: ByteArray, footprint_Q: IntArray) -> IntArray:
    """Numbers y * resolution + x of all pixels whose footprint is free."""
    resolution = tables.params.resolution
    corner = tables.pad * (tables.side + 1)
    blocked = occupancy > FREE_MAX
    rows = np.zeros(resolution * tables.side, np.bool_)
    for offset in np.unique(footprint_Q).tolist():
        # The last row may run over the end of the map, beyond the columns that count.
        part = blocked[corner + offset : corner + offset + len(rows)]
        rows[: len(part)] |= part
    return np.flatnonzero(~rows.reshape(resolution, tables.side)[:, :resolution])


def _distractors(
    tables: _Tables, maps: ByteArray, stream_N: KeyArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Place distractors on the occupancy of each picture, adding to it.

    Returns pixels and headings of their paddles, [N, K, P], and how many are there.
    """
    params = tables.params
    count, length = len(stream_N), params.paddles_per_distractor
    pixel_NKP = np.zeros((count, params.num_distractors, length), np.int64)
    heading_NKP = np.zeros_like(pixel_NKP)
    placed_N = np.zeros(count, np.int64)
    num_attempts = params.num_distractors * DISTRACTOR_TRIES
    num_seed_draws = SEED_TRIES * (BLIND_DRAWS + 2)
    num_draws = num_seed_draws + PADDLE_TRIES * (length - 1)

    # Attempts at an unusable degree fail at once; the next one at a usable degree is looked up.
    place_A = _FIRST_DISTRACTOR + np.arange(num_attempts) * num_draws
    first_NA = (_uniform(stream_N[:, None], place_A) * NUM_DEGREES).astype(np.int64)
    next_NA = np.where(tables.usable_H[first_NA], np.arange(num_attempts), num_attempts)
    next_NA = np.pad(next_NA, ((0, 0), (0, 1)), constant_values=num_attempts)
    next_NA = np.minimum.accumulate(next_NA[:, ::-1], axis=1)[:, ::-1]

    now_N = next_NA[:, 0]
    while True:
        open_N = np.flatnonzero(now_N < num_attempts)
        if not open_N.size:
            return pixel_NKP, heading_NKP, placed_N
        attempt_N = now_N[open_N]
        before = maps[open_N]
        free_N = np.count_nonzero(before <= FREE_MAX, axis=1)
        found_N, tail_NC, heading_N, pivot_NC = _place_seeds(
            tables,
            maps,
            open_N,
            first_NA[open_N, attempt_N],
            stream_N[open_N],
            place_A[attempt_N],
        )
        found_N &= free_N >= MIN_FREE_SHARE * params.resolution**2
        seeded = np.flatnonzero(found_N)
        base_N = open_N[seeded] * maps.shape[1]
        pixel_N1P = np.zeros((len(seeded), 1, length), np.int64)
        heading_N1P = np.zeros_like(pixel_N1P)
        pixel_N1P[:, 0, 0] = base_N + _flat(tables, tail_NC[seeded])
        heading_N1P[:, 0, 0] = heading_N[seeded]
        complete = _grow(
            tables,
            maps,
            base_N,
            pivot_NC[seeded, None],
            pixel_N1P,
            heading_N1P,
            stream_N[open_N[seeded]],
            place_A[attempt_N[seeded]] + num_seed_draws,
        )
        won = np.zeros(len(open_N), np.bool_)
        won[seeded[complete]] = True
        maps[open_N[~won]] = before[~won]
        last = heading_N1P[complete, 0, -1]
        _stamp(
            maps, pixel_N1P[complete, 0, -1], tables.mask_HQ[last], tables.mask_value_HQ[last]
        )
        row_N = open_N[seeded[complete]]
        pixel_NKP[row_N, placed_N[row_N]] = pixel_N1P[complete, 0] - base_N[complete, None]
        heading_NKP[row_N, placed_N[row_N]] = heading_N1P[complete, 0]
        placed_N[row_N] += 1
        # After a success the tries that are left of this distractor are skipped.
        following_N = (attempt_N // DISTRACTOR_TRIES + 1) * DISTRACTOR_TRIES
        now_N[open_N] = next_NA[open_N, np.where(won, following_N, attempt_N + 1)]


# Pictures ---------------------------------------------------------------------------------------


def _draw(
    tables: _Tables,
    stream_N: KeyArray,
    marked_N: IntArray,
    pictures: Pictures,
    index_N: IntArray,
) -> None:
    """Make the pictures of one margin and write them to the rows `index_N`."""
    num_paddles = tables.params.num_paddles
    pixel_NSP, heading_NSP, draws_N = _target_pairs(tables, stream_N)
    rows_N = np.arange(len(index_N))
    end_NS2C = _points(tables, pixel_NSP[:, :, [0, -1]])
    # Marker 0 is at the origin of the marked contour, marker 1 at its terminal or at the other's.
    other_N = np.where(pictures.labels_N[index_N] == 1, marked_N, 1 - marked_N)
    markers_N2C = np.stack([end_NS2C[rows_N, marked_N, 0], end_NS2C[rows_N, other_N, 1]], axis=1)
    pictures.markers_N2C[index_N] = markers_N2C
    pictures.origins_NSC[index_N] = end_NS2C[:, :, 0]
    pictures.terminals_NSC[index_N] = end_NS2C[:, :, 1]
    pictures.headings_NSP[index_N] = np.degrees(tables.radians_H[heading_NSP])
    pictures.pair_draws_N[index_N] = draws_N

    step = max(16, MAP_BYTES // len(tables.frame))
    for low in range(0, len(index_N), step):
        part = slice(low, low + step)
        count = len(index_N[part])
        base_N = np.arange(count) * len(tables.frame)
        targets = np.zeros((count, len(tables.frame)), np.uint8)
        occupancy = np.tile(tables.frame, (count, 1))
        for contour in range(2):
            for paddle in range(num_paddles):
                heading_N = heading_NSP[part, contour, paddle]
                pixel_N = base_N + pixel_NSP[part, contour, paddle]
                _stamp(
                    targets, pixel_N, tables.line_HQ[heading_N], tables.line_value_HQ[heading_N]
                )
                # The first contour's last paddle never enters the occupancy, as in the original.
                if (contour, paddle) != (0, num_paddles - 1):
                    _stamp(
                        occupancy,
                        pixel_N,
                        tables.mask_HQ[heading_N],
                        tables.mask_value_HQ[heading_N],
                    )
        pixel_NKP, dist_heading_NKP, placed_N = _distractors(tables, occupancy, stream_N[part])
        others = np.zeros_like(targets)
        for k in range(pixel_NKP.shape[1]):
            present = np.flatnonzero(placed_N > k)
            for paddle in range(pixel_NKP.shape[2]):
                heading_N = dist_heading_NKP[present, k, paddle]
                _stamp(
                    others,
                    base_N[present] + pixel_NKP[present, k, paddle],
                    tables.line_HQ[heading_N],
                    tables.line_value_HQ[heading_N],
                )
        pictures.num_distractors_N[index_N[part]] = placed_N
        pictures.images_NRR[index_N[part]] = _compose(tables, targets, others, markers_N2C[part])


def _compose(
    tables: _Tables, targets: ByteArray, others: ByteArray, markers_N2C: IntArray
) -> ByteArray:
    """Weigh the contours by their contrast, add the markers and stretch each picture to 0 .. 255."""
    params = tables.params
    inner = slice(tables.pad, tables.pad + params.resolution)
    square = (-1, tables.side, tables.side)
    contrast = params.snake_contrast
    picture_NRR = targets.reshape(square)[:, inner, inner] * (
        contrast * params.paddle_contrast / 255
    )
    other_NRR = others.reshape(square)[:, inner, inner] * (contrast / 255)
    # Single precision here decides which halves are rounded up, as in the original's files.
    picture_NRR = np.maximum(picture_NRR, other_NRR).astype(np.float32).astype(np.float64)
    reach = math.ceil(params.marker_radius) + 5  # with room for the filter
    last = params.resolution - 1
    for picture_RR, marker_2C in zip(picture_NRR, markers_N2C.tolist(), strict=True):
        for y, x in marker_2C:
            above, below = min(reach, y), min(reach, last - y)
            left, right = min(reach, x), min(reach, last - x)
            disc = _marker(params.marker_radius, above, below, left, right) / 255
            area = picture_RR[y - above : y + below + 1, x - left : x + right + 1]
            np.maximum(area, disc, out=area)
    low_N = picture_NRR.min(axis=(1, 2), keepdims=True)
    high_N = picture_NRR.max(axis=(1, 2), keepdims=True)
    return ((picture_NRR - low_N) * (255 / (high_N - low_N)) + 0.5).astype(np.uint8)
