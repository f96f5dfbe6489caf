"""Every figure that antiphon has on a GPU, in nine minutes: `bench/gpu.sh`.

`suite.py` runs the sections. Each is a function of another module, and runs in a separate process within its share of
the time. `report.py` stores the figures. The models are those of `bench/models.py`.
"""
