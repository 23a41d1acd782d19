'use strict';
// Draws reports. A report is the JSON that `towers/report/page.py` describes; times in it are
// whole microseconds from the beginning of the step.

const LANE = 11, PASS = 17, TITLE = 18, AXIS = 20;

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim();
}

function element(tag, text, parent) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.appendChild(made);
  return made;
}

// The text of a name or a sentence, with places in it where a narrow page may begin a new line.
function breakable(text, parent) {
  text.replace(/(\w[/=.(,])(?=[^\d\s])/g, '$1\n').split('\n').forEach((piece, place) => {
    if (place) element('wbr', undefined, parent);
    parent.append(piece);
  });
}

function milliseconds(micros) {
  const value = micros / 1000;
  return value.toFixed(value < 1 ? 3 : value < 100 ? 2 : 0) + ' ms';
}

function bytesText(count) {
  for (const [size, unit] of [[1e9, 'GB'], [1e6, 'MB'], [1e3, 'kB']]) {
    if (count >= size) return (count / size).toFixed(1) + ' ' + unit;
  }
  return count + ' B';
}

function percent(part, whole) {
  return (whole ? 100 * part / whole : 0).toFixed(1) + ' %';
}

// ---- the operations, whose names are stored as what differs from the name before ----------------

function unpackNames(packed) {
  const rest = packed.rest.split('\n');
  let last = '';
  return packed.keep.map((kept, place) => (last = last.slice(0, kept) + rest[place]));
}

// ---- the timeline --------------------------------------------------------------------------------

class Timeline {
  constructor(report, section, longest) {
    this.report = report;
    this.operations = report.operations;
    this.names = unpackNames(this.operations);
    this.canvas = section.querySelector('canvas');
    this.hover = section.querySelector('.hover');
    this.output = section.querySelector('output');
    this.longest = longest;
    this.from = 0;
    this.to = longest;
    this.found = null;
    this.layOut();
    this.listen(section);
    this.draw();
  }

  layOut() {
    let top = AXIS;
    this.tops = this.report.rows.map(([, kind, lanes], row) => {
      const begin = top;
      const hasPasses = this.report.passes.some(pass => pass[0] === row);
      top += TITLE + (hasPasses ? PASS : 0) + lanes * LANE + 12;
      return {title: begin, pass: begin + TITLE, lanes: begin + TITLE + (hasPasses ? PASS : 0),
              end: top - 9};
    });
    this.height = top;
    this.canvas.style.height = top + 'px';
    this.canvas.setAttribute('aria-label', 'Timeline: ' +
      this.report.rows.map(row => row[0]).join(', '));
  }

  x(micros) { return (micros - this.from) / (this.to - this.from) * this.width; }

  draw() {
    const ratio = window.devicePixelRatio || 1;
    this.width = this.canvas.clientWidth;
    this.canvas.width = this.width * ratio;
    this.canvas.height = this.height * ratio;
    const pen = this.canvas.getContext('2d');
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, this.width, this.height);
    pen.textBaseline = 'middle';
    this.colours = this.report.parts.map(part => colour(part[0]));
    this.drawRows(pen);
    this.drawOperations(pen);
    this.drawPasses(pen);
    this.drawChain(pen);
    this.drawAxis(pen);
  }

  drawRows(pen) {
    const wait = colour('wait'), text = colour('text');
    const end = Math.min(this.width, this.x(this.report.micros));
    this.report.rows.forEach(([name, , lanes], row) => {
      const place = this.tops[row];
      pen.fillStyle = wait;
      pen.fillRect(0, place.lanes, Math.max(0, end), lanes * LANE);
      pen.fillStyle = text;
      pen.font = '600 12px system-ui, sans-serif';
      pen.fillText(name, 2, place.title + TITLE / 2);
    });
  }

  drawOperations(pen) {
    const {row, lane, begin, length, part, type} = this.operations;
    const last = new Map();  // of a row and lane: the right end of what was drawn there
    pen.font = '9px system-ui, sans-serif';
    for (const place of this.order()) {
      const end = begin[place] + length[place];
      if (end < this.from || begin[place] > this.to) continue;
      const left = this.x(begin[place]), width = Math.max(0.6, this.x(end) - left);
      const key = row[place] * 256 + lane[place], shown = this.found && !this.found[place];
      if (left + width <= (last.get(key) || -1) + 0.3 && !this.found) continue;
      last.set(key, left + width);
      const top = this.tops[row[place]].lanes + lane[place] * LANE;
      pen.globalAlpha = shown ? 0.12 : 1;
      pen.fillStyle = this.colours[part[place]];
      pen.fillRect(left, top + 0.5, width, LANE - 1);
      if (width > 34 && !shown) {
        pen.save();
        pen.beginPath();
        pen.rect(left, top, width, LANE);
        pen.clip();
        pen.fillStyle = '#111';
        pen.fillText(this.report.types[type[place]] || this.names[place].split('/').pop(),
                     Math.max(left, 0) + 3, top + LANE / 2 + 0.5);
        pen.restore();
      }
    }
    pen.globalAlpha = 1;
  }

  order() {
    if (!this.ordered) {
      const begin = this.operations.begin;
      this.ordered = Array.from(begin.keys()).sort((one, other) => begin[one] - begin[other]);
    }
    return this.ordered;
  }

  drawPasses(pen) {
    pen.font = '11px system-ui, sans-serif';
    for (const [row, part, group, begin, end] of this.report.passes) {
      const left = this.x(begin), width = this.x(end) - left;
      if (left + width < 0 || left > this.width) continue;
      const top = this.tops[row].pass;
      pen.globalAlpha = 0.42;
      pen.fillStyle = this.colours[part];
      pen.fillRect(left, top, Math.max(1, width - 1), PASS - 3);
      pen.globalAlpha = 1;
      if (width < 26) continue;
      pen.save();
      pen.beginPath();
      pen.rect(left, top, width, PASS);
      pen.clip();
      pen.fillStyle = colour('text');
      const name = this.report.groups[group];
      const labels = [this.report.parts[part][0] + ', ' + name, name, name.split(', ').pop()];
      const fitting = labels.find(each => pen.measureText(each).width <= width - 8);
      pen.fillText(fitting || '', Math.max(left, 0) + 4, top + PASS / 2 - 1);
      pen.restore();
    }
  }

  drawChain(pen) {
    pen.fillStyle = colour('chain');
    for (const [row, begin, end] of this.report.chain.spans) {
      const left = this.x(begin);
      pen.fillRect(left, this.tops[row].end - 1.5, Math.max(1, this.x(end) - left), 2.5);
    }
  }

  drawAxis(pen) {
    const range = this.to - this.from, least = range / Math.max(2, this.width / 90);
    const power = Math.pow(10, Math.floor(Math.log10(least)));
    const step = [1, 2, 5, 10].map(each => each * power).find(each => each >= least);
    pen.strokeStyle = colour('line');
    pen.fillStyle = colour('faint');
    pen.font = '11px system-ui, sans-serif';
    pen.lineWidth = 1;
    const digits = Math.max(0, 3 - Math.floor(Math.log10(step)));
    for (let at = Math.ceil(this.from / step) * step; at <= this.to; at += step) {
      const x = Math.round(this.x(at)) + 0.5;
      pen.globalAlpha = 0.6;
      pen.beginPath();
      pen.moveTo(x, 14);
      pen.lineTo(x, this.height);
      pen.stroke();
      pen.globalAlpha = 1;
      pen.fillText((at / 1000).toFixed(Math.min(3, digits)) + ' ms', x + 2, 8);
    }
  }

  zoom(factor, x) {
    const range = this.to - this.from, at = this.from + range * x / this.width;
    const wanted = Math.min(this.longest, Math.max(2, range / factor));
    this.from = Math.max(0, Math.min(this.longest - wanted, at - wanted * x / this.width));
    this.to = this.from + wanted;
    this.draw();
  }

  move(pixels) {
    const range = this.to - this.from;
    this.from = Math.max(0, Math.min(this.longest - range,
                                     this.from - pixels / this.width * range));
    this.to = this.from + range;
    this.draw();
  }

  whole() {
    this.from = 0;
    this.to = this.longest;
    this.draw();
  }

  at(x, y) {
    const {row, lane, begin, length} = this.operations;
    const micros = this.from + (this.to - this.from) * x / this.width;
    const slack = (this.to - this.from) / this.width * 2;
    let nearest = -1;
    for (let place = 0; place < begin.length; place += 1) {
      const top = this.tops[row[place]].lanes + lane[place] * LANE;
      if (y < top || y >= top + LANE || micros < begin[place] - slack ||
          micros > begin[place] + length[place] + slack) continue;
      if (nearest < 0 || length[place] > length[nearest]) nearest = place;
    }
    return nearest;
  }

  tell(x, y) {
    const place = this.at(x, y), {row, begin, length, part, group, type} = this.operations;
    if (place < 0) return;
    this.hover.textContent = [
      this.names[place], this.report.types[type[place]], this.report.parts[part[place]][1],
      this.report.groups[group[place]], this.report.rows[row[place]][0],
      milliseconds(length[place]) + ' from ' + milliseconds(begin[place])
    ].filter(Boolean).join('  ·  ');
  }

  find(text) {
    this.found = text ? this.names.map(name => name.includes(text)) : null;
    const lengths = this.operations.length.filter((_, place) => text && this.found[place]);
    const micros = lengths.reduce((sum, length) => sum + length, 0);
    this.output.textContent =
      text ? `${lengths.length} operations, ${milliseconds(micros)} together` : '';
    this.draw();
  }

  listen(section) {
    const canvas = this.canvas, fingers = new Map();
    section.querySelector('.tools').addEventListener('click', event => {
      const factor = event.target.dataset.zoom;
      if (factor === undefined) return;
      if (factor === '0') this.whole(); else this.zoom(Number(factor), this.width / 2);
    });
    section.querySelector('input').addEventListener(
      'input', event => this.find(event.target.value));
    canvas.addEventListener('wheel', event => {
      if (!event.ctrlKey && !event.shiftKey && !event.deltaX && this.to - this.from === this.longest
          && event.deltaY > 0) return;  // the page scrolls
      event.preventDefault();
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        this.move(-(event.deltaX || event.deltaY));
      } else this.zoom(event.deltaY < 0 ? 1.25 : 0.8, event.offsetX);
    }, {passive: false});
    canvas.addEventListener('pointerdown', event => {
      fingers.set(event.pointerId, event.offsetX);
      canvas.setPointerCapture(event.pointerId);
      this.tell(event.offsetX, event.offsetY);
    });
    canvas.addEventListener('pointermove', event => {
      const before = fingers.get(event.pointerId);
      if (before === undefined) return this.tell(event.offsetX, event.offsetY);
      const others = [...fingers].filter(([id]) => id !== event.pointerId).map(each => each[1]);
      fingers.set(event.pointerId, event.offsetX);
      if (!others.length) return this.move(event.offsetX - before);
      const apart = Math.max(10, Math.abs(before - others[0]));
      this.zoom(Math.max(10, Math.abs(event.offsetX - others[0])) / apart,
                (event.offsetX + others[0]) / 2);
    });
    for (const kind of ['pointerup', 'pointercancel']) {
      canvas.addEventListener(kind, event => fingers.delete(event.pointerId));
    }
    canvas.addEventListener('keydown', event => {
      const middle = this.width / 2;
      const action = {'+': () => this.zoom(1.5, middle), '-': () => this.zoom(1 / 1.5, middle),
                      '0': () => this.whole(), ArrowLeft: () => this.move(60),
                      ArrowRight: () => this.move(-60)}[event.key];
      if (action) { event.preventDefault(); action(); }
    });
  }
}

// ---- tables, bars and curves ---------------------------------------------------------------------

function table(parent, heads, rows) {
  const line = element('tr', undefined, element('thead', undefined, parent));
  tables.push(parent);
  heads.forEach(head => element('th', head, line));
  const body = element('tbody', undefined, parent);
  for (const cells of rows) {
    const row = element('tr', undefined, body);
    cells.forEach((cell, column) => {
      const made = element('td', undefined, row);
      if (column) made.dataset.head = heads[column];
      if (cell && cell.part) element('i', undefined, made).style.background = `var(--${cell.part})`;
      breakable(String(cell && cell.part ? cell.text : cell), made);
    });
  }
}

// Shows each row of a table that is wider than its place as a few lines, each figure with its head.
function fitTables() {
  for (const each of tables) {
    each.classList.remove('lines');
    if (each.offsetWidth > each.parentNode.clientWidth) each.classList.add('lines');
  }
}

function verdict(report, parent) {
  for (const [text, advice] of report.verdict) {
    const entry = element('li', undefined, parent);
    breakable(text + '.', element('b', undefined, entry));
    const change = element('p', undefined, entry);
    element('i', 'To change: ', change);
    breakable(advice + '.', change);
  }
}

function legend(report, parent) {
  const used = new Set(report.operations.part);
  const parts = report.parts.filter((_, place) => used.has(place));
  for (const [part, title] of parts.concat([['waiting', 'waiting'], ['chain', 'longest chain']])) {
    const entry = element('span', undefined, parent);
    element('i', undefined, entry).style.background = `var(--${part})`;
    entry.append(title);
  }
}

function shares(report, section) {
  const bars = section.querySelector('.bars');
  const used = report.parts.map((part, place) => place).filter(
    place => report.shares.some(([, micros]) => micros[place] > 0));
  for (const [device, micros] of report.shares) {
    const bar = element('div', undefined, bars);
    bar.className = 'bar';
    element('b', device, bar);
    const filled = element('div', undefined, bar);
    for (const place of used) {
      const piece = element('span', undefined, filled);
      piece.style.width = percent(micros[place], report.micros).replace(' ', '');
      piece.style.background = `var(--${report.parts[place][0]})`;
      piece.title = report.parts[place][1] + ', ' + percent(micros[place], report.micros);
    }
  }
  const heads = ['part'].concat(report.shares.map(each => each[0]));
  const rows = used.map(place => [{part: report.parts[place][0], text: report.parts[place][1]}]
    .concat(report.shares.map(([, micros]) => percent(micros[place], report.micros))));
  rows.push([{part: 'waiting', text: 'waiting'}].concat(report.shares.map(([, micros]) =>
    percent(report.micros - micros.reduce((one, other) => one + other, 0), report.micros))));
  table(section.querySelector('table'), heads, rows);
  report.facts.forEach(fact => element('p', fact, section.querySelector('.facts')));
}

function layers(report, section) {
  if (!report.layers) return section.remove();
  const {title, rows, note} = report.layers;
  const total = rows.reduce((sum, row) => sum + row[1] + row[2], 0);
  section.querySelector('h2').textContent = title;
  section.querySelector('.note').textContent = note;
  table(section.querySelector('table'),
        ['layer', 'together', 'of the stage', 'forward', 'backward', 'operations'],
        rows.map(([name, forward, backward, count]) => [
          name || 'all others', milliseconds(forward + backward),
          percent(forward + backward, total), milliseconds(forward), milliseconds(backward),
          count]));
}

function chain(report, section) {
  const rows = report.chain.table.map(([part, device, micros, count, name]) => [
    {part: part < 0 ? 'waiting' : report.parts[part][0],
     text: part >= 0 ? report.parts[part][1] : device ? 'waiting, device busy'
       : 'waiting, device idle'},
    device, milliseconds(micros), percent(micros, report.micros), count, name]);
  table(section.querySelector('table'),
        ['part', 'device', 'time', 'of the step', 'operations', 'the longest of them'], rows);
}

function curve(pool, micros, parent) {
  const width = Math.max(280, parent.clientWidth), height = 170, left = 70, bottom = 22;
  const all = pool.measured.concat(pool.predicted).map(point => point[1]);
  const most = Math.max(1, ...all, pool.peaks[0] || 0, pool.peaks[1] || 0) * 1.08;
  const x = at => left + (width - left - 5) * at / micros;
  const y = bytes => (height - bottom) * (1 - bytes / most) + 2;
  const path = points => points.map(([at, bytes], place) => (place ? 'H' + x(at).toFixed(1) + 'V'
    : 'M' + x(at).toFixed(1) + ' ') + y(bytes).toFixed(1)).join('');
  const ticks = [0, 0.5, 1].map(share => most / 1.08 * share).map(bytes =>
    `<line x1="${left}" x2="${width}" y1="${y(bytes)}" y2="${y(bytes)}" stroke="var(--line)"/>` +
    `<text x="${left - 6}" y="${y(bytes) + 4}" text-anchor="end">${bytesText(bytes)}</text>`);
  const times = [0, 0.5, 1].map(share => `<text x="${x(share * micros)}" y="${height - 4}"
    text-anchor="${['start', 'middle', 'end'][share * 2]}">${milliseconds(share * micros)}</text>`);
  const drawing = element('div', undefined, parent);
  const title = [pool.name];
  if (pool.peaks[0] !== null) title.push('measured ' + bytesText(pool.peaks[0]));
  if (pool.peaks[1] !== null) title.push('predicted ' + bytesText(pool.peaks[1]));
  element('b', title.join(' · '), drawing);
  drawing.insertAdjacentHTML('beforeend', `<svg viewBox="0 0 ${width} ${height}" role="img">
    ${ticks.join('')}${times.join('')}
    <path d="${path(pool.predicted)}" fill="none" stroke="var(--combination)"
      stroke-dasharray="6 4" stroke-width="2"/>
    <path d="${path(pool.measured)}" fill="none" stroke="var(--copies)" stroke-width="2"/></svg>`);
}

function memory(report, section) {
  const parent = section.querySelector('.curves');
  report.memory.pools.forEach(pool => curve(pool, report.micros, parent));
  section.querySelector('.note').textContent = report.memory.note;
}

function transfers(report, section) {
  const {devices, bytes, note} = report.transfers;
  const rows = devices.map((device, from) => [device].concat(bytes[from].map(
    (count, to) => (from === to ? '' : count ? bytesText(count) : '–'))));
  table(section.querySelector('table'), ['from, to'].concat(devices), rows);
  section.querySelector('.note').textContent = note;
}

function texts(report, section) {
  for (const [title, text] of report.texts) {
    const details = element('details', undefined, section);
    details.open = true;
    element('summary', title, details);
    element('pre', text, details);
  }
}

function variables(report, section) {
  const rows = report.variables;
  const total = rows.reduce((sum, row) => sum + row[4], 0);
  section.querySelector('summary').textContent =
    `${rows.length} variables, ${bytesText(total)}`;
  section.querySelector('details').open = rows.length <= 100;
  section.querySelector('details').addEventListener('toggle', fitTables);
  table(section.querySelector('table'), ['name', 'role', 'device', 'shape', 'bytes', 'written by'],
        rows.map(row => [row[0], row[1], row[2], row[3], bytesText(row[4]), row[5]]));
}

// ---- the page ------------------------------------------------------------------------------------

const shown = [];  // the timelines
const tables = [];

function show(report, longest) {
  const article = document.getElementById('one').content.cloneNode(true).firstElementChild;
  document.getElementById('reports').appendChild(article);
  const part = name => article.querySelector('.' + name);
  article.querySelector('h1').textContent = report.title;
  part('subtitle').textContent = report.subtitle;
  verdict(report, part('verdict'));
  legend(report, part('legend'));
  shares(report, part('shares'));
  layers(report, part('layers'));
  chain(report, part('chain'));
  memory(report, part('memory'));
  transfers(report, part('transfers'));
  texts(report, part('texts'));
  variables(report, part('variables'));
  shown.push(new Timeline(report, part('timeline'), longest));
}

function showAll(reports) {
  shown.length = 0;
  tables.length = 0;
  const parent = document.getElementById('reports');
  parent.textContent = '';
  parent.className = reports.length > 1 ? 'two' : '';
  const longest = Math.max(...reports.map(report => report.micros));
  reports.forEach(report => show(report, longest));
  fitTables();
  document.documentElement.dataset.drawn = Math.round(performance.now());  // after the page began
}

function reportsIn(page) {
  return Array.from(page.querySelectorAll('script[type="application/json"]'),
                    each => JSON.parse(each.textContent));
}

const reports = reportsIn(document);
showAll(reports);
const redraw = () => { shown.forEach(timeline => timeline.draw()); fitTables(); };
let width = window.innerWidth;
window.addEventListener('resize', () => {
  if (window.innerWidth !== width) { width = window.innerWidth; redraw(); }
});
window.addEventListener('beforeprint', redraw);
window.addEventListener('afterprint', redraw);
for (const query of ['(prefers-color-scheme: dark)', 'print']) {
  window.matchMedia(query).addEventListener('change', redraw);
}
document.getElementById('other').addEventListener('change', async event => {
  const text = await event.target.files[0].text();
  const other = reportsIn(new DOMParser().parseFromString(text, 'text/html'));
  if (other.length) showAll([reports[0], other[0]]);
  else window.alert('This file is no report of a step.');
});
