"""Checkpoint savers for LangGraph on Threadkeep's stores.

The classes have the names, constructors and context managers of LangGraph's own savers, so that changing the import is
enough::

    from threadkeep.langgraph import SqliteSaver

    with SqliteSaver.from_conn_string("checkpoints.db") as saver:
        graph = builder.compile(checkpointer=saver)
"""

from threadkeep.langgraph._postgres import AsyncPostgresSaver, PostgresSaver
from threadkeep.langgraph._saver import Fence, ThreadkeepSaver
from threadkeep.langgraph._sqlite import AsyncSqliteSaver, SqliteSaver

__all__ = [
    "AsyncPostgresSaver",
    "AsyncSqliteSaver",
    "Fence",
    "PostgresSaver",
    "SqliteSaver",
    "ThreadkeepSaver",
]
