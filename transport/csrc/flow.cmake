# SPDX-License-Identifier: Apache-2.0
# The sources of the flow, in groups that are compiled together: in FLOW_SOURCES, for libsennit_core and for models and
# fuzzers that compile them in their own way.
set(FLOW_RANK_SOURCES
  flow/control.cpp
  flow/counters.cpp
  flow/eager.cpp
  flow/flow.cpp
  flow/path_policy.cpp
  flow/receive_budget.cpp
  telemetry/counter_page.cpp
)
set(FLOW_WAY_SOURCES
  flow/outstanding.cpp
  flow/receiver.cpp
  flow/recovery.cpp
  flow/reps.cpp
  flow/sender.cpp
  flow/state.cpp
)
# Each of them names the same constants of its own.
set(FLOW_CONGESTION_SOURCES
  flow/congestion.cpp
  flow/dctcp.cpp
  flow/swift.cpp
)
list(TRANSFORM FLOW_RANK_SOURCES PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
list(TRANSFORM FLOW_WAY_SOURCES PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
list(TRANSFORM FLOW_CONGESTION_SOURCES PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
set_source_files_properties(${FLOW_RANK_SOURCES} PROPERTIES UNITY_GROUP flow_rank)
set_source_files_properties(${FLOW_WAY_SOURCES} PROPERTIES UNITY_GROUP flow_way)
set(FLOW_SOURCES ${FLOW_RANK_SOURCES} ${FLOW_WAY_SOURCES} ${FLOW_CONGESTION_SOURCES})
