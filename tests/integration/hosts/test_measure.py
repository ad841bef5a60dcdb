import json
import pytest, time
from collections import Counter
from integration.hosts.shapes import HOSTS, Server, Host
from integration.hosts.roads import ROADS, pages, worker
from sqlalchemy import create_engine
from support.workers.business import Business

@pytest.mark.parametrize("road", [*ROADS, "dashboard"])
@pytest.mark.parametrize("host", list(HOSTS))
def test_m(host, road, schema_url, engine, business, make_database):
    h = HOSTS[host]
    began = time.monotonic()
    server = Server(schema_url, engine, make_database)
    out = "done"
    with h.database(server) as url:
        try:
            if road == "dashboard":
                worker(Host(), schema_url)
                out = pages(h, url)
                exp = pages(Host(), schema_url)
                out = "SAME" if out == exp else f"DIFF {[(a[:90], a[-900:], b[-500:]) for a, b in zip(out.split(chr(10)), exp.split(chr(10))) if a != b]}" 
            else:
                ROADS[road](h, url)
        except BaseException as e:
            out = f"{type(e).__name__}: {str(e)[:600]}"
        ls = ""
        try:
            if "a database" not in host:
                ls = business.rows("SELECT error FROM dead_letter")
                applied = dict(business.applied()); rec = sorted(business.recorded())
            else: applied = rec = None
        except Exception as e: applied = rec = repr(e)
    with open("/tmp/measure.txt", "a") as f:
        f.write(f"## {host} x {road} [{time.monotonic()-began:.1f}s]: {out} | {applied} {rec} | {[x[-300:] for x in ls]}\n")
