"""What precedes serving: settings that are checked, a profile that is chosen, models that are here and prepared."""

from __future__ import annotations

import logging
from dataclasses import replace

from antiphon.cli.start.checks import check_certificate, check_models, check_state, check_writable
from antiphon.cli.start.models import fetch, require
from antiphon.loading.loader import store_of
from antiphon.loading.profile_choice import choose_profile
from antiphon.settings import Settings

log = logging.getLogger("antiphon.cli.main")


def prepare_to_serve(settings: Settings, *, fetches: bool) -> Settings:
    """Return the settings with their profile, once the models are here; what can be found wrong is found before any of
    them is fetched. Blocks.

    `fetches` false: nothing is fetched. Raises SettingsError, StoreError.
    """
    check_home(settings, create=fetches)
    if settings.server.record:
        check_writable(settings.server.record, "--record")
    check_certificate(settings)
    check_models(settings)
    check_state(settings)
    settings = with_profile(settings, fetches=fetches)
    if fetches:
        fetch(settings)
    else:
        require(settings)
    return settings


def check_home(settings: Settings, *, create: bool) -> None:
    """Raise StoreError where models cannot be kept. `create`: make the folder where it is missing."""
    store_of(settings.models).check_home(create=create and not settings.models.offline)


def with_profile(settings: Settings, *, fetches: bool = True) -> Settings:
    """Return the settings with a profile that is chosen by now, which is told with its reason. Raises StoreError."""
    offline = settings.models.offline or not fetches
    choice = choose_profile(replace(settings, models=replace(settings.models, offline=offline)))
    log.info("profile %s: %s", choice.profile, choice.reason)
    return choice.applied(settings)
