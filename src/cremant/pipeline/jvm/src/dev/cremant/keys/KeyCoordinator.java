// SPDX-License-Identifier: Apache-2.0
package dev.cremant.keys;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.Iterator;
import java.util.List;
import org.apache.spark.api.java.function.FlatMapGroupsWithStateFunction;
import org.apache.spark.sql.Dataset;
import org.apache.spark.sql.Encoders;
import org.apache.spark.sql.RelationalGroupedDataset;
import org.apache.spark.sql.streaming.GroupState;
import org.apache.spark.sql.streaming.GroupStateTimeout;
import org.apache.spark.sql.streaming.OutputMode;
import scala.Tuple2;

/**
 * The key coordinator's decision for one key of one epoch. State: the greatest candidate so far
 * (rank, then epoch). All candidates of a key in an epoch come in one call, whatever tasks they are
 * from, so one candidate per key is all the state needs.
 *
 * <p>Out come, behind a byte that says which, reports of tasks as they are (0), and per key with a
 * new greatest candidate (1) the ends of that candidate and of the one before it, if there was one:
 * location and epoch, 24 bytes each. What follows from them is decided by who knows the epoch.
 */
public final class KeyCoordinator
    implements FlatMapGroupsWithStateFunction<byte[], Tuple2<byte[], byte[]>, byte[], byte[]> {

  private static final long serialVersionUID = 1L;
  private static final int HASH_BYTES = 16;
  private static final int VALUE_BYTES = 24;
  private static final byte REPORT = 0;
  private static final byte DECISION = 1;

  /** Candidates (columns: candidate, key; grouped by what stands for the key) to decisions. */
  public static Dataset<byte[]> coordinate(RelationalGroupedDataset candidates) {
    return candidates
        .<byte[], Tuple2<byte[], byte[]>>as(
            Encoders.BINARY(), Encoders.tuple(Encoders.BINARY(), Encoders.BINARY()))
        .flatMapGroupsWithState(
            new KeyCoordinator(),
            OutputMode.Update(),
            Encoders.BINARY(),
            Encoders.BINARY(),
            GroupStateTimeout.NoTimeout());
  }

  @Override
  public Iterator<byte[]> call(
      byte[] key, Iterator<Tuple2<byte[], byte[]>> candidates, GroupState<byte[]> state) {
    if (key.length < HASH_BYTES && key[key.length - 1] == REPORT) {
      List<byte[]> reports = new ArrayList<>(1);
      while (candidates.hasNext()) {
        byte[] report = candidates.next()._1();
        byte[] out = new byte[1 + report.length];
        out[0] = REPORT;
        System.arraycopy(report, 0, out, 1, report.length);
        reports.add(out);
      }
      return reports.iterator();
    }
    byte[] before = state.exists() ? state.get() : null;
    byte[] best = before;
    while (candidates.hasNext()) {
      byte[] candidate = candidates.next()._1();
      if (best == null || Arrays.compareUnsigned(candidate, best) > 0) {
        best = candidate;
      }
    }
    if (best == before) {
      return Collections.emptyIterator();
    }
    state.update(best);
    byte[] out = new byte[1 + (before == null ? VALUE_BYTES : 2 * VALUE_BYTES)];
    out[0] = DECISION;
    System.arraycopy(best, best.length - VALUE_BYTES, out, 1, VALUE_BYTES);
    if (before != null) {
      System.arraycopy(before, before.length - VALUE_BYTES, out, 1 + VALUE_BYTES, VALUE_BYTES);
    }
    return Collections.singleton(out).iterator();
  }
}
