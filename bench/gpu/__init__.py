"""Every figure that antiphon has on a GPU, in nine minutes: `bench/gpu.sh`.

`suite.py` runs the sections, each in a process of its own and within its share of the time; `report.py` keeps what they
measure. A section is a function of the modules beside them. The models are those of `bench/models.py`.
"""
