"""Polling: bring deliveries from the source to the processor, and outcomes back to the source.

::

    prefetch=0     poller               receive → process → settle, in one thread; ``threads`` of these
    prefetch=n     prefetching_poller   threads that receive ahead, into a bounded buffer; a consumer that takes batches
                                        out of it, and processes them; threads that settle behind, ten deliveries a call

    both           batch_runner         processes one batch to the end, whatever happens on the way
                   settler              acks and hands back, as the outcomes say
                   activity             tracks what is in hand, the outcomes so far, and whether the worker is paused
"""
