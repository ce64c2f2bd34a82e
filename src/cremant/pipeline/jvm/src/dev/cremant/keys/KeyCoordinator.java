// SPDX-License-Identifier: Apache-2.0
package dev.cremant.keys;

import java.util.Iterator;
import java.util.UUID;
import org.apache.spark.TaskContext;
import org.apache.spark.api.java.function.MapPartitionsFunction;
import org.apache.spark.deploy.SparkHadoopUtil;
import org.apache.spark.sql.Dataset;
import org.apache.spark.sql.Encoders;
import org.apache.spark.sql.Row;
import org.apache.spark.sql.execution.streaming.state.NoPrefixKeyStateEncoderSpec;
import org.apache.spark.sql.execution.streaming.state.StateStore;
import org.apache.spark.sql.execution.streaming.state.StateStore$;
import org.apache.spark.sql.execution.streaming.state.StateStoreConf;
import org.apache.spark.sql.execution.streaming.state.StateStoreId;
import org.apache.spark.sql.execution.streaming.state.StateStoreProviderId;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.util.TaskCompletionListener;
import scala.Option;

/**
 * The key coordinator: packs of candidates in, decisions out, and between them Spark's state store,
 * which keeps the greatest candidate of each key. One partition of the input is one partition of the
 * state.
 *
 * <p>Spark's own stateful operators sort, group and encode row by row, which is most of what they
 * cost; here a task walks through its packs and asks the store for many keys at once. What makes a
 * state exact stays Spark's: batch b reads version b and leaves version b + 1, whoever tries it how
 * often; a task that fails leaves nothing; versions, changelogs and snapshots are the store's.
 */
public final class KeyCoordinator implements MapPartitionsFunction<byte[], byte[]> {

  private static final long serialVersionUID = 1L;
  private static final StructType BINARY =
      new StructType().add("value", DataTypes.BinaryType, false);

  private final String location;
  private final StateStoreConf conf;

  private KeyCoordinator(String location, StateStoreConf conf) {
    this.location = location;
    this.conf = conf;
  }

  /** Packs (one column) to decisions; state is kept in the checkpoint of the streaming query. */
  public static Dataset<byte[]> coordinate(Dataset<Row> packs, String checkpoint) {
    var session = ((org.apache.spark.sql.classic.Dataset<Row>) packs).sparkSession();
    var conf = StateStoreConf.apply(session.sessionState().conf());
    var coordinator = new KeyCoordinator(checkpoint + "/state", conf);
    return packs.as(Encoders.BINARY()).mapPartitions(coordinator, Encoders.BINARY());
  }

  @Override
  public Iterator<byte[]> call(Iterator<byte[]> packs) {
    TaskContext task = TaskContext.get();
    StateStore store = open(task);
    task.addTaskCompletionListener(
        (TaskCompletionListener)
            ended -> {
              if (!store.hasCommitted()) {
                store.abort();
              }
            });
    return new Decisions(packs, store);
  }

  /** This task's partition of the state as the batch before left it. */
  private StateStore open(TaskContext task) {
    long batch = Long.parseLong(task.getLocalProperty("streaming.sql.batchId"));
    // Of the query's run: Spark lets go of its stores when it ends.
    UUID run = UUID.fromString(task.getLocalProperty("spark.jobGroup.id"));
    var id = new StateStoreId(location, 0, task.partitionId(), StateStoreId.DEFAULT_STORE_NAME());
    return StateStore$.MODULE$.get(
        new StateStoreProviderId(id, run),
        BINARY,
        BINARY,
        new NoPrefixKeyStateEncoderSpec(BINARY),
        batch,
        Option.empty(),
        Option.empty(),
        false,
        conf,
        SparkHadoopUtil.get().conf(),
        false);
  }
}
