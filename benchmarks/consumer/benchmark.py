"""The consumer's benchmark: what exactly-once costs, and how far our worker stays behind pgbench and a bare loop.

One business update, an amount onto one of 10,000 accounts, is measured with and without the inbox.
"""

from functools import partial

from benchmarks.consumer.clients import Case, consume
from benchmarks.consumer.scripts import batch_script, single_script
from benchmarks.shared.measurements import Row, Sample, Table, WrongResult
from benchmarks.shared.program import Benchmark, Option, Run
from benchmarks.shared.work import in_processes, together

ONE_CONNECTION, SIXTEEN_CONNECTIONS = 0.5, 0.9
SET_OF_TEN, SET_OF_HUNDRED = 0.6, 0.95
WORKER_OF_BARE = WITH_OF_WITHOUT = 0.87
EFFECT_SINGLE = {1: 1.0, 16: 0.8}
EFFECT_OF_TEN = {1: 1.0, 4: 0.8}
EFFECT_GATHERED = 0.95
"""Targets, as ratios."""

DESCRIPTION = """\
Measure the same business update by

  pgbench   the limit: the server with a client that costs nothing; for a batch it
            sends the same arrays and statements as a client must
  bare      a loop with a session, the record written by hand, the same handler
  worker    our worker, its source in memory
  effect    our worker with an effect in SQL, which reads JSON bodies besides

in three forms:

  message   a transaction for each message
  each      a transaction for a batch of 10, the handler called for each message
  set       a transaction for a batch, one call and one statement for all of it

A key is "client form batch, connections": "worker set 100, 1c"; "x2" means that two
processes share the connections. "no inbox" is the business update alone. 5 % of the
messages are duplicates. After each measurement the balances must add up to what the
distinct messages say, to the last one; otherwise nothing is reported.
"""


def tables(run: Run) -> list[Table]:
    """Handlers for a message, and for a batch, against pgbench; then the worker against the bare loop."""
    options, shown = run.options, []

    def row(case: Case, to: Case | None = None, least: float | None = None) -> Row:
        limit = to.key if to else None
        return Row(case.key, partial(_measured, run, case), limit, least, ours=case.client in ("worker", "effect"))

    for count in options["connections"]:
        limit = Case("pgbench", "message", 1, count)
        single, batches, overhead = [row(limit)], [], []
        for form, size in (("message", 1), ("each", 10), *(("set", size) for size in options["batches"])):
            bare, worker = (Case(client, form, size, count) for client in ("bare", "worker"))
            if form == "set":
                limit, least, rows = limit._replace(form=form, batch=size), SET_OF_TEN, batches
                least = SET_OF_TEN if size < 100 else SET_OF_HUNDRED
                rows.append(row(limit))
            else:
                least, rows = {1: ONE_CONNECTION, 16: SIXTEEN_CONNECTIONS}.get(count), single
            rows += [row(bare, limit), row(worker, limit, least)]
            ours = [worker]
            if form != "each":
                ours.append(worker._replace(client="effect"))
                rows.append(row(ours[-1], limit, _least_of_effect(form, size, count)))
            if count >= 4:
                rows += [row(one._replace(processes=2), limit, least) for one in ours]
            overhead.append(Row(worker.key, None, bare.key, WORKER_OF_BARE))
        shown += [Table("a call for each message", single), Table("a call for a batch", batches)]
        shown.append(Table("worker against the bare loop", overhead, plotted=False))
    # In a batch the commit is shared, and what is left of the time is the records themselves: see the tables.
    inbox = []
    for client in ("pgbench", "bare") if 1 in options["connections"] else ():
        case = Case(client, "message", 1, 1)
        alone = case._replace(inbox=False)
        inbox += [row(alone), Row(case.key, None, alone.key, WITH_OF_WITHOUT)]
    return [*shown, Table("with the inbox against without", inbox, plotted=False)]


def _least_of_effect(form: str, size: int, connections: int) -> float | None:
    if form == "message":
        return EFFECT_SINGLE.get(connections)
    return EFFECT_GATHERED if size >= 100 else EFFECT_OF_TEN.get(connections)


def _measured(run: Run, case: Case) -> Sample:
    """Measure, and see that what was applied is what the distinct messages say."""
    database, cpu = run.database, {}
    if case.client == "pgbench":
        script = single_script(inbox=case.inbox) if case.form == "message" else batch_script(case.batch)
        database.reset(script.seeds)
        result = run.pgbench(script.text, case.connections, script.variables)
        per_second, messages = result.tps * case.batch, result.transactions * case.batch
        applied = database.recorded() if case.inbox else messages
        if not 0.9 * messages <= applied <= messages:
            raise WrongResult(f"{case.key}: {messages} messages left {applied} records")
    else:
        database.reset()
        results = in_processes(case.processes, consume, case, run.url, run.options["seconds"])
        applied = sum(distinct if case.inbox else acked for _, acked, distinct in results)
        if case.inbox and database.recorded() != applied:
            raise WrongResult(f"{case.key}: {applied} messages left {database.recorded()} records")
        rate = together([rate for rate, _, _ in results])
        per_second, cpu = rate.per_second, {"cpu_us": rate.cpu_us}
    database.check(applied, case.key)
    return Sample(per_second, cpu)


BENCHMARK = Benchmark(
    name="consumer",
    title="Messages consumed a second, each with a business update",
    description=DESCRIPTION,
    options={
        "rounds": Option("how often each is measured", 2, 3),
        "seconds": Option("of each measurement", 1.0, 2.0),
        "connections": Option("numbers of them, with commas", (1, 16), (1, 4, 16)),
        "batches": Option("sizes of batches, with commas", (10, 100), (10, 100, 1000)),
    },
    tables=tables,
    settings={},
)
