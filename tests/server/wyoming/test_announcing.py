"""The announcement of the Wyoming port by zeroconf, on loopback only. It needs the extra `[wyoming]`."""

from __future__ import annotations

import asyncio

import pytest

from antiphon.server.wyoming.listening import SERVICE, address_of, announced

LIMIT_S = 20


def test_when_the_port_is_announced_then_others_find_its_address_until_it_ends() -> None:
    pytest.importorskip("zeroconf")
    from zeroconf import Zeroconf
    from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

    async def main() -> None:
        seen: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

        def on_change(zeroconf: Zeroconf, service_type: str, name: str, state_change: object) -> None:
            seen.put_nowait((name, str(state_change)))

        finder = AsyncZeroconf(interfaces=["127.0.0.1"])
        browser = AsyncServiceBrowser(finder.zeroconf, SERVICE, handlers=[on_change])
        try:
            async with asyncio.timeout(LIMIT_S):
                async with announced("antiphon of a test", "127.0.0.1", 10300):
                    name, change = await seen.get()
                    assert "Added" in change
                    assert name == f"antiphon of a test.{SERVICE}"
                    found = AsyncServiceInfo(SERVICE, name)
                    assert await found.async_request(finder.zeroconf, 3000)
                    assert (found.parsed_addresses(), found.port) == (["127.0.0.1"], 10300)
                while "Removed" not in (await seen.get())[1]:
                    pass
        finally:
            await browser.async_cancel()
            await finder.async_close()

    asyncio.run(main())


def test_when_there_is_no_name_then_nothing_is_announced() -> None:
    async def main() -> None:
        async with announced("", "127.0.0.1", 10300):
            pass

    asyncio.run(main())


def test_when_a_host_has_no_address_then_it_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert address_of("127.0.0.1") == "127.0.0.1"
    assert address_of("no-such-host.invalid") == ""
    assert "not announced" in caplog.text
