"""A run of the demo in which all was well, for one purchase."""

from txbox_demo.accounting import Comparison, Deliveries, Notices, Sends
from txbox_demo.plan import Plan
from txbox_demo.report import Report, Shop
from txbox_demo.standing import Standing

COMPLETE = Deliveries(received=2, processed=1, duplicates=1, failed=0, in_flight=0, contradictions=())
NOTICES = Notices(
    mails=1,
    refused=0,
    once=1,
    unsure=0,
    unsure_twice=0,
    unsure_once=0,
    missing=(),
    repeated=(),
    wrong=(),
    contradictions=(),
)
RIGHT = Report(
    plan=Plan(purchases=1, workers=2, kills=0, seed=1),
    shop=Shop(placed=1, rolled_back=1, wrong=()),
    sends=Sends(messages=2, handed=3, contradictions=()),
    deliveries={"billing": COMPLETE, "notification": COMPLETE},
    kills={"shop": {"anywhere": 1}, "relay": {"sent": 2, "claimed": 0}},
    processes_started=11,
    comparison=Comparison(customers=1, wrong=(), expected_cents=117700, found_cents=117700, difference_cents=0),
    notices=NOTICES,
    standing=Standing(placed=1, billed=1, notified=1),
    dead=0,
    seconds=1.0,
    schema="txbox_demo_0",
    queue_urls=("q", "r"),
)
