"""Every figure that antiphon has on a GPU, in nine minutes: `bench/gpu.sh`.

`suite.py` runs the sections, each in a separate process and within its share of the time. `report.py` stores the
figures. A section is a function of the other modules. The models are those of `bench/models.py`.
"""
