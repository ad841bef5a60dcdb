"""Patches moto's SNS and EventBridge, so that they can run for long and deliver what AWS would deliver.

Both send to SQS queues. Measured with moto 5.2.5:

* a topic keeps everything that was ever published to it, so a server that keeps running grows without end.
* an event reaches its targets without ``account``, rewritten through a text template. One that contains ``<detail>``
  is broken, and each costs 7 ms.
"""

from collections import deque
from typing import Any


def patch_sns_eventbridge(service: str) -> None:
    """Patch SNS or EventBridge before its first use. ``service`` is moto's name for it.

    Other services are left alone. So are these two until they are used, as importing them takes time and memory.
    """
    if service == "sns":
        _patch_topics()
    elif service == "events":
        _patch_events()


def _patch_topics() -> None:
    from moto.sns import models

    class LocalTopic(models.Topic):
        """A topic that forgets what it has delivered."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.sent_notifications = deque(maxlen=0)  # type: ignore[assignment] # moto only appends to it

    models.Topic = LocalTopic  # type: ignore[misc] # the class that SNSBackend.create_topic looks up


def _patch_events() -> None:
    from moto.events import models
    from moto.events.utils import EventTemplateParser

    class LocalParser(EventTemplateParser):
        """Leaves an event as it is, unless its target has a template."""

        @staticmethod
        def parse(input_template: str, input_paths_map: dict[str, Any], event: Any) -> dict[str, Any]:
            if input_template:
                return EventTemplateParser.parse(input_template, input_paths_map, event)
            return {name: value for name, value in event.items() if name != "ingestion-time"}

    models.EventTemplateParser = LocalParser  # type: ignore[attr-defined] # the class that Rule.send_to_targets looks up
