"""How many sessions a machine holds: measuring it (`antiphon certify`), and admitting by it (`serve --certificate`)."""
