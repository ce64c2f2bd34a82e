// SPDX-License-Identifier: Apache-2.0
package dev.cremant.keys;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.Arrays;
import java.util.Iterator;
import java.util.NoSuchElementException;
import org.apache.spark.sql.catalyst.expressions.UnsafeRow;
import org.apache.spark.sql.catalyst.expressions.codegen.UnsafeRowWriter;
import org.apache.spark.sql.execution.streaming.state.StateStore;
import org.apache.spark.sql.execution.streaming.state.StateStoreCustomMetric;
import scala.Tuple2;

/**
 * What becomes of the packs of one task. Layouts are those of ingest/packs.py; the first byte says
 * what it is:
 *
 * <pre>
 * 0 report of a task         passed on as it is
 * 1 candidates               count, bounds of keys (count + 1), bounds of candidates (count + 1),
 *                            all 4 bytes little-endian; keys; candidates
 *   -> decisions             per candidate that is greater than what its key had: the ends (24 bytes,
 *                            location and epoch) of that candidate and of the one before, zeros if none
 * 2 (out, last) state        keys, bytes of files and memory, 8 bytes big-endian each
 * </pre>
 */
final class Decisions implements Iterator<byte[]> {

  private static final byte REPORT = 0;
  private static final byte CANDIDATES = 1;
  private static final byte STATE = 2;
  private static final int VALUE_BYTES = 24;
  private static final int HASH_BYTES = 16;

  /** Keys that the store is asked for at once. */
  private static final int LOOKUP_KEYS = 1024;

  /** Where the number of keys is kept; no key of a row ends with byte 0. */
  private static final byte[] COUNTER = {0};

  private static final String FAMILY = "default";

  private final Iterator<byte[]> packs;
  private final StateStore store;
  private final UnsafeRowWriter writer = new UnsafeRowWriter(1, 64);
  private final MessageDigest md5;
  private final long keysBefore;
  private long keys;

  Decisions(Iterator<byte[]> packs, StateStore store) {
    this.packs = packs;
    this.store = store;
    try {
      md5 = MessageDigest.getInstance("MD5");
    } catch (NoSuchAlgorithmException error) {
      throw new IllegalStateException(error);
    }
    UnsafeRow counted = store.get(row(COUNTER, 0, COUNTER.length), FAMILY);
    keysBefore = counted == null ? 0 : ByteBuffer.wrap(counted.getBinary(0)).getLong();
    keys = keysBefore;
  }

  @Override
  public boolean hasNext() {
    return !store.hasCommitted();
  }

  @Override
  public byte[] next() {
    if (!hasNext()) {
      throw new NoSuchElementException();
    }
    if (!packs.hasNext()) {
      return commit();
    }
    byte[] pack = packs.next();
    return pack[0] == CANDIDATES ? decide(pack) : pack;
  }

  private byte[] decide(byte[] pack) {
    ByteBuffer numbers = ByteBuffer.wrap(pack).order(ByteOrder.LITTLE_ENDIAN);
    int count = numbers.getInt(1);
    int keyBounds = 5;
    int candidateBounds = keyBounds + 4 * (count + 1);
    int keyData = candidateBounds + 4 * (count + 1);
    int candidateData = keyData + numbers.getInt(keyBounds + 4 * count);
    byte[] out = new byte[1 + 2 * VALUE_BYTES * count];
    out[0] = CANDIDATES;
    int end = 1;
    for (int first = 0; first < count; first += LOOKUP_KEYS) {
      UnsafeRow[] asked = new UnsafeRow[Math.min(LOOKUP_KEYS, count - first)];
      for (int place = 0; place < asked.length; place++) {
        int at = keyBounds + 4 * (first + place);
        asked[place] = key(pack, keyData + numbers.getInt(at), keyData + numbers.getInt(at + 4));
      }
      scala.collection.Iterator<UnsafeRow> found = store.multiGet(asked, FAMILY);
      for (int place = 0; place < asked.length; place++) {
        UnsafeRow known = found.next();
        byte[] before = known == null ? null : known.getBinary(0);
        int at = candidateBounds + 4 * (first + place);
        int from = candidateData + numbers.getInt(at);
        int to = candidateData + numbers.getInt(at + 4);
        if (before == null) {
          keys++;
        } else if (Arrays.compareUnsigned(pack, from, to, before, 0, before.length) <= 0) {
          continue;
        } else {
          System.arraycopy(
              before, before.length - VALUE_BYTES, out, end + VALUE_BYTES, VALUE_BYTES);
        }
        store.put(asked[place], row(pack, from, to), FAMILY);
        System.arraycopy(pack, to - VALUE_BYTES, out, end, VALUE_BYTES);
        end += 2 * VALUE_BYTES;
      }
    }
    return Arrays.copyOf(out, end);
  }

  /** A key as the state knows it: itself below 16 bytes, else its 128-bit hash. */
  private UnsafeRow key(byte[] data, int from, int to) {
    if (to - from < HASH_BYTES) {
      return row(data, from, to).copy();
    }
    md5.update(data, from, to - from);
    return row(md5.digest(), 0, HASH_BYTES).copy();
  }

  /** A row of one cell, good until the next one is made. */
  private UnsafeRow row(byte[] data, int from, int to) {
    writer.reset();
    writer.write(0, data, from, to - from);
    return writer.getRow();
  }

  private byte[] commit() {
    if (keys != keysBefore) {
      byte[] counted = ByteBuffer.allocate(8).putLong(keys).array();
      store.put(row(COUNTER, 0, COUNTER.length).copy(), row(counted, 0, 8), FAMILY);
    }
    store.commit();
    var metrics = store.metrics();
    long bytes = metrics.memoryUsedBytes();
    scala.collection.Iterator<Tuple2<StateStoreCustomMetric, Object>> custom =
        metrics.customMetrics().iterator();
    while (custom.hasNext()) {
      Tuple2<StateStoreCustomMetric, Object> metric = custom.next();
      if (metric._1().name().equals("rocksdbSstFileSize")) {
        bytes += (Long) metric._2();
      }
    }
    return ByteBuffer.allocate(17).put(STATE).putLong(keys).putLong(bytes).array();
  }
}
